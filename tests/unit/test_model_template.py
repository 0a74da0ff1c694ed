"""The bundled model's chat template: append only, whatever is said."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom_server.cluster.model import chat_template

Message = dict[str, Any]

END = "<|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_trains",
            "description": "Trains between two cities, with <prices> & “times”.",
            "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
            "strict": None,
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]


def render(messages: list[Message], *, tools: Any = TOOLS, prompt: bool = False) -> str:
    return compiled().render(
        messages=messages, tools=tools, add_generation_prompt=prompt
    )


@functools.cache
def compiled() -> Template:
    """As transformers compiles it, without its weight."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    return environment.from_string(chat_template().read_text())


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)


def written(message: Message, **spacing: Any) -> str:
    """What the model wrote for ``message`` to be parsed from it."""
    calls = message.get("tool_calls") or []
    return (message["content"] or "") + "".join(
        f'<tool_call>\n{{"name": {_tojson(call["function"]["name"])}, '
        f'"arguments": {_tojson(call["function"]["arguments"], **spacing)}}}'
        "\n</tool_call>"
        for call in calls
    )


def call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": "call-1", "type": "function", "function": function}


text = st.text(max_size=30)
values = st.one_of(
    st.none(), st.booleans(), st.integers(), text, st.lists(text, max_size=2)
)
calls = st.builds(
    lambda name, arguments: call(name) | {"function": dict(name=name, **arguments)},
    st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
    st.builds(lambda a: {"arguments": a}, st.dictionaries(text, values, max_size=3)),
)
contents = st.one_of(
    text, st.lists(st.builds(lambda t: {"type": "text", "text": t}, text), max_size=3)
)
asked = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "system", "developer", "tool"]),
    contents,
)
answers = st.one_of(
    st.builds(lambda content: {"role": "assistant", "content": content}, text),
    st.builds(
        lambda content, calls: {
            "role": "assistant",
            "content": content,
            "tool_calls": calls,
        },
        st.one_of(st.none(), text),
        st.lists(calls, min_size=1, max_size=3),
    ),
)
conversations = st.lists(st.one_of(asked, answers), min_size=1, max_size=8)


@given(conversations, answers, conversations, st.sampled_from([TOOLS, None]))
def test_a_continuation_keeps_all_that_was_generated(
    history: list[Message], answer: Message, rest: list[Message], tools: Any
) -> None:
    """The next prompt begins with this prompt and the answer as it was written."""
    before = render(history, tools=tools, prompt=True) + written(answer) + END
    after = render([*history, answer, *rest], tools=tools, prompt=True)
    assert after.startswith(before)


@given(conversations, st.data(), st.sampled_from([TOOLS, None]), st.booleans())
def test_every_part_of_a_conversation_is_a_prefix_of_the_whole(
    messages: list[Message], data: st.DataObject, tools: Any, prompt: bool
) -> None:
    """History can be sent ahead, up to any message, and be found in the cache."""
    num_ahead = data.draw(st.integers(1, len(messages)))
    ahead = render(messages[:num_ahead], tools=tools)
    assert render(messages, tools=tools, prompt=prompt).startswith(ahead)


@given(conversations, answers, st.sampled_from([None, 1, 4]))
def test_a_call_in_other_spacing_is_kept_up_to_its_arguments(
    history: list[Message], answer: Message, indent: int | None
) -> None:
    """What the engine normalises costs the arguments, and nothing before them."""
    sent = render(history, prompt=True) + written(answer, indent=indent)
    kept = render([*history, answer], prompt=True)
    start = sent.find('"arguments": {', len(render(history, prompt=True)))
    end = len(sent) if start < 0 else start + len('"arguments": {')
    assert kept.startswith(sent[:end])


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_no_content_is_no_content(content: Any) -> None:
    """A call renders the same with content null, empty, or left out."""
    message: Message = {"role": "assistant", "tool_calls": [call("ping")]}
    if content != "absent":
        message["content"] = content
    told = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert render([message], tools=None) == f"<|im_start|>assistant\n{told}{END}\n"


def test_arguments_that_are_still_text_are_kept_as_they_are() -> None:
    """Outside vLLM, nothing parses the arguments: they are not encoded twice."""
    asked = call("ping")
    asked["function"]["arguments"] = '{"a":  1}'
    message = {"role": "assistant", "content": None, "tool_calls": [asked]}
    assert '"arguments": {"a":  1}}\n' in render([message])


def test_parts_are_joined_by_line_breaks() -> None:
    """A list of text parts is read as vLLM itself would join it."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    joined = render([{"role": "user", "content": "one \ntwo"}])
    assert render([{"role": "user", "content": parts}]) == joined


def test_the_tools_are_told_as_json_lines() -> None:
    """The model reads each tool's name, description and schema, unescaped."""
    shown = render([{"role": "system", "content": "Be brief."}])
    assert shown.startswith("<|im_start|>system\nBe brief.\n\n")
    lines = shown.split("<tools>\n")[1].split("</tools>")[0].splitlines()
    trains, ping = (json.loads(line)["function"] for line in lines)
    assert (
        trains["description"] == "Trains between two cities, with <prices> & “times”."
    )
    assert trains["parameters"] == TOOLS[0]["function"]["parameters"]  # type: ignore[index]
    assert ping == {"name": "ping"}
    assert shown.count("<|im_start|>system") == 1


def test_strict_does_not_change_the_prompt() -> None:
    """Asking for strict arguments on one turn costs no reuse."""
    strict = [
        {**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS
    ]  # type: ignore[dict-item]
    messages = [{"role": "user", "content": "Hello"}]
    assert render(messages, tools=strict) == render(messages)


def test_without_tools_and_system_prompt_there_is_no_system_block() -> None:
    """Nothing is put into a conversation that nobody asked for."""
    messages = [{"role": "user", "content": "Hello"}]
    expected = f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\n"
    assert render(messages, tools=None, prompt=True) == expected
    assert render(messages, tools=[], prompt=True) == expected


def test_results_in_a_row_share_a_user_turn() -> None:
    """The results of parallel calls are one answer to the model."""
    messages = [{"role": "tool", "content": c} for c in ("sunny", "12 degrees")]
    assert render(messages, tools=None, prompt=True) == (
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        f"<tool_response>\n12 degrees\n</tool_response>{END}\n"
        "<|im_start|>assistant\n"
    )


def test_reasoning_is_left_out() -> None:
    """A message renders the same with and without its reasoning."""
    answer = {"role": "assistant", "content": "Paris."}
    thought = {**answer, "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert render([thought]) == render([answer])


def test_a_developer_speaks_as_the_system() -> None:
    """OpenAI's newer role renders as the one that the model knows, in its place."""
    later = [{"role": "user", "content": "Hello"}]
    for before in ([], later):
        said = [
            render([*before, {"role": role, "content": "Be brief."}, *later])
            for role in ("developer", "system")
        ]
        assert said[0] == said[1]
