"""Which histories a handle follows: the pure part, by properties."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom._history import History, history_of

CHAT = "/chat/completions"

texts = st.text(max_size=8)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts})
)


def _chat(messages: list[Any], **body: Any) -> History:
    history = history_of(CHAT, {"model": "m", "messages": messages, **body})
    assert history is not None
    return history


def _prompt(prompt: Any) -> History:
    history = history_of("/completions", {"prompt": prompt})
    assert history is not None
    return history


@settings(deadline=None)  # a busy machine is no failure
@given(messages, messages)
def test_a_longer_conversation_continues_the_shorter(
    begun: list[Any], more: list[Any]
) -> None:
    """Whatever is added at the end, the handle still fits."""
    assert _chat(begun + more).begins_with(_chat(begun).mark())


@settings(deadline=None)  # a busy machine is no failure
@given(messages, messages)
def test_a_history_continues_only_its_own_beginning(
    one: list[Any], other: list[Any]
) -> None:
    """A handle fits exactly the histories that begin with its own."""
    is_beginning = one == other[: len(one)]
    assert _chat(other).begins_with(_chat(one).mark()) == is_beginning


@settings(deadline=None)  # a busy machine is no failure
@given(texts, texts)
def test_a_bare_prompt_continues_only_its_own_beginning(one: str, other: str) -> None:
    """The same holds for prompts of text."""
    fits = _prompt(other).begins_with(_prompt(one).mark())
    assert fits == other.startswith(one)


tokens = st.lists(st.integers(0, 120), max_size=6)


@settings(deadline=None)  # a busy machine is no failure
@given(tokens, tokens)
def test_token_prompts_are_compared_token_by_token(
    one: list[int], other: list[int]
) -> None:
    """Token 1 is not the beginning of token 12."""
    fits = _prompt(other).begins_with(_prompt(one).mark())
    assert fits == (one == other[: len(one)])


def test_what_shapes_the_prompt_belongs_to_the_history() -> None:
    """Other tools, template arguments or cache salt make another history."""
    plain = _chat([]).mark()
    for body in (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"cache_salt": "s"},
    ):
        assert not _chat([], **body).begins_with(plain)


def test_what_does_not_shape_the_prompt_is_left_out() -> None:
    """Forcing a tool, or another temperature, keeps the history."""
    plain = _chat([]).mark()
    for body in ({"tool_choice": "required"}, {"temperature": 0.5}, {"n": 2}):
        assert _chat([], **body).begins_with(plain)


def test_key_order_and_nulls_do_not_matter() -> None:
    """The same message, written in another order, is the same message."""
    one = _chat([{"role": "user", "content": "hi", "name": None}])
    other = _chat([{"content": "hi", "role": "user"}])

    assert one == other


def test_endpoints_do_not_share_histories() -> None:
    """A chat and a response render differently, so their handles differ."""
    chat = history_of(CHAT, {"messages": []})
    response = history_of("/responses", {"input": []})

    assert chat is not None
    assert response is not None
    assert not response.begins_with(chat.mark())


def test_a_history_that_is_elsewhere_cannot_be_told() -> None:
    """No handle follows a request whose history only the server knows."""
    assert history_of("/responses", {"input": "x", "previous_response_id": "r"}) is None
    assert history_of("/completions", {"prompt": ["a", "b"]}) is None
    assert history_of(CHAT, {"messages": "hi there"}) is not None
    assert history_of(CHAT, {"messages": [{"content": object()}]}) is None
    assert history_of(CHAT, {}) is None


def test_lone_surrogates_are_history_too() -> None:
    """Text that UTF-8 cannot hold does not break a turn."""
    assert _chat([{"role": "user", "content": "\ud800"}]).mark().length == 1
    assert _prompt("\ud800").mark().length == 1
