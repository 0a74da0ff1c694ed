"""Requests of other APIs as the chat requests that vLLM makes of them."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .template import dump

BILLING: Final = "x-anthropic-billing-header"
"""Text of a system prompt that vLLM leaves out: it differs each time."""


def chat_of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """A ``/v1/responses`` request as a chat request."""
    effort = (body.get("reasoning") or {}).get("effort")
    schema = ((body.get("text") or {}).get("format") or {}).get("schema")
    return _given(
        {
            **_taken(body, _SAME),
            "messages": list(_response_messages(body)),
            "tools": [_nested(tool) for tool in body.get("tools") or ()] or None,
            "tool_choice": _responses_choice(body),
            "max_tokens": body.get("max_output_tokens"),
            "reasoning_effort": effort,
            "response_format": _schema_format(schema),
        }
    )


def chat_of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """A ``/v1/messages`` request as a chat request."""
    tools = body.get("tools")
    config = body.get("output_config") or {}
    is_off = (body.get("thinking") or {}).get("type") == "disabled"
    return _given(
        {
            **_taken(body, _SAME),
            "messages": list(_anthropic_messages(body)),
            "max_tokens": body.get("max_tokens"),
            "stop": body.get("stop_sequences"),
            "tools": None if tools is None else [_of_anthropic(t) for t in tools],
            "tool_choice": _anthropic_choice(body),
            "reasoning_effort": config.get("effort") or ("none" if is_off else None),
            "response_format": _schema_format(
                (config.get("format") or {}).get("schema")
            ),
        }
    )


def completion_of_generate(body: Mapping[str, Any]) -> dict[str, Any]:
    """A ``/inference/v1/generate`` request, with its sampling parameters where
    a completion has them."""
    taken = _taken(body, ("model", "stream", "stream_options", "cache_salt"))
    return _given(
        {
            **(body.get("sampling_params") or {}),
            **taken,
            "kv_transfer_params": body.get("kv_transfer_params"),
        }
    )


_SAME: Final = (
    "model",
    "stream",
    "cache_salt",
    "kv_transfer_params",
    "chat_template_kwargs",
    "ignore_eos",
    "stop",
    "temperature",
    "top_p",
    "request_id",
)


def _taken(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: body[name] for name in names if name in body}


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _schema_format(schema: Any) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# --- responses


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    inner = {k: v for k, v in tool.items() if k != "type"}
    return {"type": "function", "function": inner}


def _responses_choice(body: Mapping[str, Any]) -> Any:
    if not body.get("tools"):
        return None
    match body.get("tool_choice", "auto"):
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case choice:
            return choice


def _response_messages(body: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    if instructions := body.get("instructions"):
        yield {"role": "system", "content": instructions}
    given = body.get("input")
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    messages: list[dict[str, Any]] = []
    for item in given or ():
        _add_item(messages, item)
    yield from messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    match item.get("type", "message"):
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = {"tool_call_id": item["call_id"], "content": item["output"]}
            messages.append({"role": "tool", **output})
        case "reasoning":
            text = "".join(part["text"] for part in item.get("content") or ())
            messages.append({"role": "assistant", "reasoning": text})
        case _:
            _add_message(messages, item)


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if item.get("role") == "assistant":
        _assistant(messages)["content"] = content
    else:
        messages.append({"role": item.get("role"), "content": content})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the next item is a part of."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


# --- messages


def _of_anthropic(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _anthropic_choice(body: Mapping[str, Any]) -> Any:
    match body.get("tool_choice"):
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "auto" | "none" as choice}:
            return choice
        case _:
            return "auto" if body.get("tools") else None


def _anthropic_messages(body: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    system = body.get("system") or ""
    parts = system if isinstance(system, list) else [{"text": system}]
    texts = [p["text"] for p in parts if not p["text"].startswith(BILLING)]
    if any(texts):
        yield {"role": "system", "content": "".join(texts)}
    for message in body.get("messages") or ():
        content = message["content"]
        if isinstance(content, str):
            yield {"role": message["role"], "content": content}
        else:
            yield from _blocks(message["role"], content)


def _blocks(role: str, blocks: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = "\n".join(part.get("text", "") for part in content)
            name = block["tool_use_id"]
            yield {"role": "tool", "tool_call_id": name, "content": content}
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    thoughts = [b["thinking"] for b in blocks if b["type"] == "thinking"]
    calls = [_call(b) for b in blocks if b["type"] == "tool_use"]
    message: dict[str, Any] = {"role": role}
    message |= {"content": text} if text else {}
    message |= {"reasoning": "".join(thoughts)} if thoughts else {}
    message |= {"tool_calls": calls} if calls else {}
    if len(message) > 1:
        yield message


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": dump(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}
