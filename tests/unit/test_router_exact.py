"""Token-exact prompts, as pure arithmetic on tokens."""

import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.api import Api
from kvloom_server.router.exact import (
    ExactOutcome,
    ExactPrompt,
    Joined,
    Spoken,
    fit_messages,
    join,
    say_the_same,
)

LOST = "\ufffd"
END = 2
WORDS = st.lists(st.integers(3, 99), max_size=12)
JSON_OBJECTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    ),
    max_size=4,
)


def ids(*parts: list[int]) -> "array[int]":
    return array("i", [token for part in parts for token in part])


def spoken(rendered: list[int], answer: list[int], exact: list[int] | None = None):
    return Spoken(
        prompt=ExactPrompt(
            rendered=ids(rendered),
            exact=ids(rendered if exact is None else exact),
            num_messages=1,
        ),
        answer=ids(answer, [END]),
    )


def plain(*parts: list[int]) -> ExactPrompt:
    """The next request's prompt, as it is rendered."""
    whole = ids(*parts)
    return ExactPrompt(rendered=whole, exact=whole, num_messages=3)


@given(WORDS, WORDS, WORDS, WORDS, WORDS)
def test_the_prompt_goes_on_from_what_was_generated(
    before, exact, generated, rendered, rest
):
    """All that was there, the answer as it was generated, and what follows it."""
    upto = [*before, *rendered, END, 1]
    joined = join(spoken(before, generated, exact), plain(upto, rest), ids(upto))
    assert isinstance(joined, Joined)
    assert joined.exact.exact == ids(exact, generated, [END, 1], rest)
    assert joined.plain.exact == ids(exact, rendered, [END, 1], rest)
    assert joined.exact.rendered == joined.plain.rendered == ids(upto, rest)
    assert joined.is_same == (generated == rendered)


@given(WORDS, WORDS, WORDS, WORDS)
def test_an_answer_that_renders_as_it_was_generated_changes_nothing(
    before, answer, more, rest
):
    """Then both prompts are the rendered one, turn after turn."""
    upto = [*before, *answer, END, 1]
    first = join(spoken(before, answer), plain(upto, more), ids(upto))
    assert isinstance(first, Joined)
    assert first.is_same
    assert first.exact == first.plain
    assert first.exact.exact == first.exact.rendered


@given(WORDS, WORDS.filter(len), WORDS, WORDS, st.data())
def test_another_history_is_never_replaced(before, history, answer, rest, data):
    """One token that differs before the answer, and the rendered prompt stands."""
    place = data.draw(st.integers(0, len(history) - 1))
    other = [*before, *history]
    other[len(before) + place] += 100
    upto = [*other, *answer, END]
    got = join(spoken([*before, *history], answer), plain(upto, rest), ids(upto))
    assert got is ExactOutcome.REWRITTEN


def test_a_template_that_changes_its_mind_is_not_trusted():
    """What is rendered up to the answer must begin what is rendered of all."""
    got = join(spoken([5], [6]), plain([5, 7, END, 9]), ids([5, 6, END]))
    assert got is ExactOutcome.REWRITTEN


@pytest.mark.parametrize("said", [[6, 7], [6, END, 7, END], []])
def test_an_answer_without_one_clear_end_stays_as_it_is(said):
    """A text that holds the end mark itself must not be cut there."""
    upto = [5, *said]
    got = join(spoken([5], [6]), plain(upto, [9]), ids(upto))
    assert got is ExactOutcome.UNCLEAR


@given(JSON_OBJECTS, st.sampled_from([None, 2, "\t"]), st.booleans())
def test_a_call_says_the_same_however_it_is_written(arguments, indent, is_ascii):
    """Order, white space and escapes of JSON are not what a call says."""
    backwards = dict(reversed(arguments.items()))
    texts = [
        f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
        for written in (
            json.dumps(arguments),
            json.dumps(backwards, indent=indent, ensure_ascii=is_ascii),
        )
    ]
    assert say_the_same(*texts)
    assert say_the_same(texts[0], f" {texts[1]}\n")


@given(JSON_OBJECTS, JSON_OBJECTS)
def test_other_arguments_say_something_else(one, other):
    """Values count, and so do their types."""
    texts = [f"<tool_call>{json.dumps(a)}</tool_call>" for a in (one, other)]
    is_same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert say_the_same(*texts) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a b", "ab"),
        ("<think>Hm.</think>Yes.", "Yes."),
        ("Sure. <tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1} {"b": 2}', '{"b": 2} {"a": 1}'),
        ("{" * 20_000, "{" * 20_001),
        # Of two values of one name a reader takes the one or the other.
        ('<tool_call>{"a": 1, "a": 2}', '<tool_call>{"a": 2}'),
        # As numbers of a machine these are the same.
        ('<tool_call>{"a": 1e400}', '<tool_call>{"a": 1e500}'),
        ('<tool_call>{"a": 0.1}', '<tool_call>{"a": 0.1000000000000000055}'),
        # Bytes that are no text all read alike.
        ("a\ufffd", "a\ufffd"),
    ],
)
def test_words_that_differ_are_told_apart(one, other):
    """Prose, thoughts, order and types: what a client or a template changes on
    purpose stays changed."""
    assert not say_the_same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("d = {}\n    return d", "d = {}\nreturn d"),
        ('Write {"a": 1}.', 'Write {"a":1}.'),
        ('Write {"b": 1, "a": 2}.', 'Write {"a": 2, "b": 1}.'),
        ("<pre>\n    x</pre>", "<pre>\nx</pre>"),
        ("<ul> <li>", "<ul><li>"),
        # Calls in tags of their own, whose values are plain text.
        *(
            (call.format(one), call.format(other))
            for call in (
                "<tool_call>\n<function=f>\n<parameter=code>\n{}\n</parameter>\n"
                "</function>\n</tool_call>",
                "<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n"
                "</tool_call>",
            )
            for one, other in (
                ("    x = 1", "x = 1"),
                ("x ", "x"),
                ("  ", " "),
                ('{"a": 1}', '{"a":1}'),
            )
        ),
        # Cut off within a word, where more may follow.
        ("<tool_call>a ", "<tool_call>a"),
    ],
)
def test_white_space_of_a_text_is_its_own(one, other):
    """Whoever indents a program, or writes JSON in an answer or in an argument in
    another way, has changed it: that is no call written anew."""
    assert not say_the_same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            'Sure.<tool_call>{"name":"f","arguments":{"a":1e3}}</tool_call><|im_end|>',
            'Sure.\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1000.0}}\n'
            "</tool_call><|im_end|>",
        ),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "b": 2}}]</s>',
            '[TOOL_CALLS][{"name": "f", "arguments": {"b": 2, "a": 1}}]</s>',
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}</s>', '[TOOL_CALLS]f[ARGS]{"a":1}</s>'),
        (
            '{"name": "f", "parameters": {"a": "\\u00e9"}}<|eot_id|>',
            '{"name": "f", "parameters": {"a": "é"}}<|eot_id|>',
        ),
        (
            '<\uff5ctool▁sep\uff5c>f\n```json\n{"a": 1}\n```<\uff5cend\uff5c>',
            '<\uff5ctool▁sep\uff5c>f\n```json\n{"a":1}\n```<\uff5cend\uff5c>',
        ),
        ('<function=f>{"a": 1}</function>', '<function=f>{"a":1}</function>'),
        ("<think>\nHm.\n</think>\n\nYes.", "<think>\nHm.</think>Yes."),
        ("Yes. \n<|im_end|>", "Yes.<|im_end|>"),
    ],
)
def test_templates_write_calls_in_their_own_way(one, other):
    """As the templates of well-known families put them."""
    assert say_the_same(one, other)


@given(st.text().filter(lambda t: LOST not in t), st.text())
def test_any_two_texts_can_be_compared(one, other):
    """No text breaks it, and each says the same as itself."""
    assert say_the_same(one, one)
    assert say_the_same(one, other) == say_the_same(other, one)


def test_only_plain_chat_requests_are_fit():
    """Where vLLM renders more than the messages, nothing is exchanged."""

    def body(**fields: object):
        return {k: msgspec.Raw(msgspec.json.encode(v)) for k, v in fields.items()}

    messages = [{"role": "user", "content": "hello"}]
    assert fit_messages(Api.CHAT, body(messages=messages)) is not None
    assert fit_messages(Api.MESSAGES, body(messages=messages)) is None
    assert fit_messages(Api.CHAT, body(messages="hello")) is None
    for name in ("documents", "continue_final_message", "truncate_prompt_tokens"):
        nothing = body(messages=messages, **{name: None})
        assert fit_messages(Api.CHAT, nothing) is not None
        assert fit_messages(Api.CHAT, body(messages=messages, **{name: [1]})) is None
