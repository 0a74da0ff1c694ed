"""The fake's tokenizer, template and model keep a conversation's tokens."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvloom.testing import Answer, Call, decode, encode, render_chat
from kvloom.testing.answers import (
    Channel,
    Limits,
    Piece,
    limited,
    pieces_of,
    sample,
)
from kvloom.testing.tokens import EOS, SPECIALS, VOCABULARY

TEXTS = st.text() | st.lists(
    st.sampled_from([*SPECIALS, " ", "\n", "word", " word", "é", "🦜", "{", '"'])
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
ANSWERS = st.builds(
    Answer,
    content=st.text(),
    reasoning=st.text(),
    tool_calls=st.lists(
        st.builds(
            Call,
            name=st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,20}", fullmatch=True),
            arguments=st.dictionaries(st.text(), JSON),
        ),
        max_size=2,
    ).map(tuple),
)


@given(TEXTS)
def test_text_survives_the_tokenizer(text: str) -> None:
    """What is encoded can be read back, in every language."""
    assert decode(encode(text)) == text


@given(TEXTS)
def test_each_token_is_whole_text(text: str) -> None:
    """A streamed token never ends inside a character."""
    ids = encode(text)
    assert "".join(decode([token_id]) for token_id in ids) == text
    assert all(0 <= token_id < VOCABULARY for token_id in ids)


def message_of(answer: Answer, pieces: list[Piece]) -> dict[str, Any]:
    """The answer as a client gets it and sends it back."""

    def joined(channel: Channel, call: int | None = None) -> str:
        chosen = (p for p in pieces if p.channel is channel and call in (None, p.call))
        return "".join(p.text for p in chosen)

    calls = [
        {
            "id": str(i),
            "type": "function",
            "function": {
                "name": joined(Channel.NAME, i),
                "arguments": joined(Channel.ARGUMENTS, i),
            },
        }
        for i in range(len(answer.tool_calls))
    ]
    return {
        "role": "assistant",
        "content": joined(Channel.CONTENT),
        "reasoning": joined(Channel.REASONING),
        "tool_calls": calls,
    }


@given(ANSWERS)
def test_a_continuation_keeps_every_token_of_the_answer(answer: Answer) -> None:
    """The next prompt begins with this prompt and the generated tokens."""
    history = [{"role": "user", "content": "hello"}]
    pieces = pieces_of(answer)
    generated = [piece.token_id for piece in pieces]
    before = encode(render_chat({"messages": history}))
    reply = message_of(answer, pieces)
    after = encode(
        render_chat(
            {"messages": [*history, reply, {"role": "tool", "content": "done"}]}
        )
    )
    assert after[: len(before) + len(generated)] == before + generated


def test_pretty_arguments_leave_the_generated_tokens() -> None:
    """The API's normalised arguments cost the answer's tail, as on real engines."""
    answer = Answer(tool_calls=(Call(name="book", arguments={"to": "Paris"}),))
    pieces = pieces_of(answer, pretty_arguments=True)
    shown = message_of(answer, pieces)["tool_calls"][0]["function"]["arguments"]
    assert shown == '{"to": "Paris"}'
    assert decode(p.token_id for p in pieces).count("\n") > 2


def test_everything_that_shapes_a_prompt_changes_it() -> None:
    """A router that drops a field that shapes the prompt gets another prompt."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    shaped = [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "a", "text": "b"}]},
        {"reasoning_effort": "low"},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ]
    prompts = [render_chat(body | fields) for fields in shaped]
    assert len({render_chat(body), *prompts}) == len(shaped) + 1


def test_a_template_may_strip_reasoning() -> None:
    """Reasoning of earlier answers is left out where the template does so."""
    messages = [{"role": "assistant", "content": "yes", "reasoning": "because"}]
    assert "because" in render_chat({"messages": messages})
    assert "because" not in render_chat({"messages": messages}, keeps_reasoning=False)


@given(ANSWERS, st.integers(1, 60), st.integers(0, 60), st.booleans())
def test_an_answer_keeps_its_limits(
    answer: Answer, max_tokens: int, min_tokens: int, ignore_eos: bool
) -> None:
    """``max_tokens`` is never passed, ``min_tokens`` and ``ignore_eos`` hold."""
    min_tokens = min(min_tokens, max_tokens)
    limits = Limits(max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos)
    output = limited(pieces_of(answer), limits, seed=7)
    assert min_tokens <= len(output.pieces) <= max_tokens
    assert (output.finish_reason == "stop") == (output.token_ids[-1] == EOS)
    if ignore_eos:
        assert len(output.pieces) == max_tokens


@given(st.text(min_size=1), st.text(min_size=1, max_size=3))
def test_a_stop_string_ends_the_answer_before_it(content: str, stop: str) -> None:
    """What is shown ends where the stop string began."""
    pieces = pieces_of(Answer(content=content))
    output = limited(pieces, Limits(max_tokens=10_000, stop=[stop]), seed=0)
    shown = "".join(p.text for p in output.pieces if p.channel is Channel.CONTENT)
    assert shown == content.split(stop)[0]
    assert output.stop_reason == (stop if stop in content else None)


def test_arguments_follow_the_tool_schema() -> None:
    """Enums, bounds and required fields of a tool's schema are kept."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "seats": {"type": "integer", "minimum": 2, "maximum": 4},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}},
            "note": {"type": "string"},
        },
        "required": ["city", "seats", "tags"],
    }
    for seed in range(20):
        value = sample(schema, seed)
        assert set(value) == {"city", "seats", "tags"}
        assert value["city"] in ("Paris", "Rome")
        assert 2 <= value["seats"] <= 4
        assert all(len(tag) <= 2 for tag in value["tags"])
        json.dumps(value)
