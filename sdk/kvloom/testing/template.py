"""A ChatML-like chat template: what a chat request looks like to the model.

A continuation keeps every token of the turn before it, prompt and answer: the
answer is rendered exactly as it was generated.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

GENERATION_PROMPT: Final = "<|im_start|>assistant\n"

# What else in a request shapes a prompt; rendered, so that a router that drops
# one of them gets another prompt, as with a real template.
_SHAPING: Final = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "mm_processor_kwargs",
)


def render_chat(body: Mapping[str, Any], *, keeps_reasoning: bool = True) -> str:
    """The prompt of a chat request.

    Args:
        body: the decoded request, already accepted.
        keeps_reasoning: ``False`` leaves out the reasoning of earlier answers,
            as many real templates do.
    """
    messages = body["messages"]
    said = (m for m in messages if m["role"] not in ("system", "developer"))
    blocks = (_block(m, keeps_reasoning=keeps_reasoning) for m in said)
    prompt = _preamble(messages, body) + "".join(blocks)
    if body.get("continue_final_message"):
        return prompt.removesuffix("<|im_end|>\n")
    if body.get("add_generation_prompt", True):
        prompt += GENERATION_PROMPT
    return prompt


def assistant_text(
    *, content: str, reasoning: str = "", calls: Sequence[tuple[str, str]] = ()
) -> str:
    """An answer as the model writes it; ``calls`` are (name, arguments)."""
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    return thought + content + "".join(call_text(*call) for call in calls)


def call_text(name: str, arguments: str) -> str:
    """A tool call as the model writes it; ``arguments`` is JSON."""
    head, tail = call_frame(name)
    return head + arguments + tail


def call_frame(name: str) -> tuple[str, str]:
    """What stands before and after a tool call's arguments."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"


def dump(value: object) -> str:
    """JSON in the one form that the template and the fake model write."""
    return json.dumps(value, ensure_ascii=False)


def _preamble(messages: Iterable[Mapping[str, Any]], body: Mapping[str, Any]) -> str:
    lines = [_text(m) for m in messages if m["role"] in ("system", "developer")]
    lines += [f"# {key}: {dump(body[key])}" for key in _SHAPING if body.get(key)]
    if tools := body.get("tools"):
        listed = "\n".join(dump(tool) for tool in tools)
        lines.append(f"# Tools\n<tools>\n{listed}\n</tools>")
    text = "\n\n".join(lines)
    return f"<|im_start|>system\n{text}<|im_end|>\n" if lines else ""


def _block(message: Mapping[str, Any], *, keeps_reasoning: bool) -> str:
    match message["role"]:
        case "assistant":
            text = _assistant(message, keeps_reasoning=keeps_reasoning)
        case "tool":
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
        case _:
            text = _text(message)
    return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"


def _assistant(message: Mapping[str, Any], *, keeps_reasoning: bool) -> str:
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return assistant_text(
        content=_text(message),
        reasoning=reasoning if keeps_reasoning else "",
        calls=[_call(call) for call in message.get("tool_calls") or ()],
    )


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    return function.get("name", ""), _normalised(arguments)


def _normalised(arguments: object) -> str:
    if not isinstance(arguments, str):
        return dump(arguments)
    try:
        return dump(json.loads(arguments))
    except ValueError:
        return arguments


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part) for part in content)


def _part(part: object) -> str:
    match part:
        case str(text) | {"type": "text", "text": str(text)}:
            return text
        case _:
            return dump(part)
