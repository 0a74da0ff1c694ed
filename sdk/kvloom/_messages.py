"""Keeps an assistant message as the model wrote it, for the turns that follow.

LangChain drops reasoning, writes tool-call arguments anew, makes empty content
null and signs an agent's messages with its name. Each of these changes the prompt
of the next turn somewhere in its middle, and all that stands behind is computed
again. What is needed to undo that is kept in ``additional_kwargs``, in a form that
LangChain merges rightly over chunks: strings that grow, and flags that are equal
wherever they stand.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from langchain_core.messages import AIMessage

KEPT: Final = "kvloom"
"""Key of ``additional_kwargs`` under which the original form is kept."""

REASONING: Final = "reasoning_content"
"""Where LangChain's own readers look for a model's reasoning."""


def keep(message: AIMessage, raw: Mapping[str, Any]) -> None:
    """Keeps in ``message`` what LangChain drops of ``raw``.

    Args:
        message: the message, or the chunk of one, that was made of ``raw``.
        raw: the decoded ``message`` or ``delta`` of an OpenAI answer.
    """
    kept = _kept_of(raw)
    if kept:
        message.additional_kwargs[KEPT] = kept
    reasoning = raw.get("reasoning") or raw.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        message.additional_kwargs[REASONING] = reasoning


def forget(message: AIMessage) -> None:
    """Takes out what chunks before this one have brought already."""
    message.additional_kwargs.pop(KEPT, None)
    message.additional_kwargs.pop(REASONING, None)


def replay(
    message: AIMessage, outgoing: dict[str, Any], *, own_names: Collection[str] = ()
) -> None:
    """Puts into ``outgoing`` what was kept of ``message``.

    What somebody has edited since is sent as edited.

    Args:
        message: the message as the graph holds it.
        outgoing: the same message as LangChain is about to send it; changed.
        own_names: of the agent that asks. The model did not write its own name
            into what it said; other agents' names tell it who spoke.
    """
    if outgoing.get("name") in own_names:
        del outgoing["name"]
    kept = message.additional_kwargs.get(KEPT)
    kept = kept if isinstance(kept, Mapping) else {}
    reasoning = message.additional_kwargs.get(REASONING)
    if isinstance(reasoning, str) and reasoning:
        outgoing["reasoning" if kept.get("short_name") else REASONING] = reasoning
    if kept and not outgoing.get("content"):
        outgoing["content"] = "" if kept.get("text") else None
    calls = _original_calls(kept.get("calls"), outgoing.get("tool_calls"))
    if calls is not None:
        outgoing["tool_calls"] = calls


def _kept_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if isinstance(raw.get("content"), str):
        kept["text"] = True
    if raw.get("reasoning"):
        kept["short_name"] = True
    calls = {
        str(call.get("index", position)): _raw(call)
        for position, call in enumerate(raw.get("tool_calls") or [])
    }
    return {**kept, "calls": calls} if calls else kept


def _raw(call: Mapping[str, Any]) -> dict[str, str]:
    """One tool call, or the piece of one that a chunk brings."""
    arguments = (call.get("function") or {}).get("arguments")
    raw = {"arguments": arguments if isinstance(arguments, str) else ""}
    return {**raw, "id": call["id"]} if call.get("id") else raw


def _original_calls(kept: object, outgoing: object) -> list[Mapping[str, Any]] | None:
    """``outgoing`` in the model's order, each with the string it wrote."""
    if not isinstance(kept, Mapping) or not isinstance(outgoing, list):
        return None
    by_id = {call.get("id"): call for call in outgoing}
    originals = [_original(kept[index]) for index in sorted(kept, key=_position)]
    ids = [call_id for call_id, _ in originals]
    if len(ids) != len(outgoing) or set(ids) != set(by_id):
        return None  # calls were added or taken out
    return [
        _with_original(by_id[call_id], arguments) for call_id, arguments in originals
    ]


def _original(raw: object) -> tuple[str | None, str]:
    """Id and arguments of a call, as they were kept; a store may have had its way
    with them."""
    fields = raw if isinstance(raw, Mapping) else {}
    call_id, arguments = fields.get("id"), fields.get("arguments")
    return (
        call_id if isinstance(call_id, str) else None,
        arguments if isinstance(arguments, str) else "",
    )


def _with_original(call: Mapping[str, Any], arguments: str) -> Mapping[str, Any]:
    function = call["function"]
    if not _means_the_same(arguments, function["arguments"]):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _means_the_same(original: str, sent: object) -> bool:
    if original == sent:
        return True
    try:
        return _canonical(original) == _canonical(str(sent))
    except ValueError:  # cut short by a limit: the engine would refuse it
        return False


def _canonical(arguments: str) -> str:
    decoded = json.loads(arguments, strict=False) if arguments else {}
    return json.dumps(decoded, sort_keys=True)


def _position(index: str) -> int:
    return int(index) if index.isdecimal() else 0
