"""What each API's body says of its prompt: one history or several, where it
begins, which messages it is made of.
"""

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import msgspec

from .api import NULL, Api, Body, is_given, is_set, items_of, object_of, raw_of
from .history import MAX_MESSAGES, History, history

_TOKEN_IDS = re.compile(rb"\[\s*[0-9]")
_INSTRUCTING_ROLES: Final = ("system", "developer")
_PLAIN_TOOLS: Final = frozenset({"function", "custom", "namespace"})
"""Tools of the Responses API that the client runs; others are run by the
engine, which then asks its core several times in one request."""

SHARED_PROMPT_BYTES: Final = 1024
"""Of a plain prompt, how much counts as its shared beginning."""


def is_one_history(api: Api, values: Body) -> bool:
    """Whether the request is one prompt and one answer, whose KV is one history
    and which prefill can compute by itself."""
    match api:
        case Api.RESPONSES:
            return not _is_engines_own(values)
        case Api.MESSAGES:
            return True
        case Api.GENERATE:
            return raw_of(_sampling(values), "n") in (NULL, b"1")
        case _:
            return _is_one_prompt(values) and _is_one_answer(values)


def needs_whole_prompt(api: Api, values: Body) -> bool:
    """Whether decode must compute the prompt itself: for log-probabilities of
    the prompt, which KV from elsewhere has not."""
    if api is Api.GENERATE:
        names = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")
        return any(is_given(_sampling(values), name) for name in names)
    # `prompt_logprobs: 0` asks for the prompt's own tokens, so only null is off.
    if is_given(values, "prompt_logprobs"):
        return True
    return is_set(values, "echo") and "logprobs" in values


def shared_beginning(api: Api, values: Body) -> bytes:
    """The beginning of the prompt that many conversations share."""
    match api:
        case Api.GENERATE:
            return raw_of(values, "token_ids")[:SHARED_PROMPT_BYTES]
        case Api.COMPLETIONS:
            return b"null\0" + raw_of(values, "prompt")[:SHARED_PROMPT_BYTES]
        case _:
            return raw_of(values, "tools") + b"\0" + b"".join(_preamble(api, values))


def history_of(api: Api, values: Body) -> History | None:
    """The conversation in a request, or ``None`` where there is none to see: a
    plain prompt, or a history that the engine keeps."""
    if api in (Api.COMPLETIONS, Api.GENERATE) or not is_one_history(api, values):
        return None
    messages = _messages(api, values)
    if messages is None:
        return None
    names = ("model", "tools", *_INSTRUCTIONS.get(api, ()))
    head = [_lasting(raw_of(values, name)) for name in names]
    preamble = list(_instructing(messages))
    return history(head=[*head, *preamble], messages=messages[len(preamble) :])


_MESSAGES: Final = {
    Api.CHAT: "messages",
    Api.MESSAGES: "messages",
    Api.RESPONSES: "input",
}
_INSTRUCTIONS: Final[dict[Api, tuple[str, ...]]] = {
    Api.MESSAGES: ("system",),
    Api.RESPONSES: ("instructions",),
}
"""Where an API has its system prompt beside the messages."""


_BILLING: Final = "x-anthropic-billing-header"
"""Begins a block that Claude Code sends with another hash at each request; vLLM
leaves it out of the prompt."""


def _lasting(raw: bytes) -> bytes:
    """A system prompt without what differs each time."""
    if _BILLING.encode() not in raw:
        return raw
    try:
        blocks = msgspec.json.decode(raw, type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError):
        return raw
    lasting = [b for b in blocks if not str(b.get("text")).startswith(_BILLING)]
    return msgspec.json.encode(lasting)


def _messages(api: Api, values: Body) -> list[msgspec.Raw] | None:
    name = _MESSAGES[api]
    raw = raw_of(values, name)
    if raw.startswith(b'"'):
        return [msgspec.Raw(b'{"role":"user","content":' + raw + b"}")]
    return items_of(values, name)


def _preamble(api: Api, values: Body) -> Iterable[bytes]:
    """The system prompt, as it came."""
    for name in _INSTRUCTIONS.get(api, ()):
        yield _lasting(raw_of(values, name))
    if api is not Api.MESSAGES:
        # What is wrong with other messages is the engine's to say.
        yield from _instructing(items_of(values, _MESSAGES[api]) or ())


def _instructing(messages: Iterable[msgspec.Raw]) -> Iterable[bytes]:
    """The system messages that a conversation begins with."""
    for message in islice(messages, MAX_MESSAGES):
        if _role(message) not in _INSTRUCTING_ROLES:
            break
        yield bytes(message)


class _Message(msgspec.Struct):
    role: str = ""


def _role(message: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(message, type=_Message).role
    except (msgspec.DecodeError, RecursionError):
        return ""


def _sampling(values: Body) -> Body:
    return object_of(values, "sampling_params")


def _is_one_prompt(values: Body) -> bool:
    if is_set(values, "prompt_embeds"):
        return False
    prompt = values.get("prompt")
    if prompt is None:
        return True
    raw = bytes(prompt)
    return raw.startswith(b'"') or _TOKEN_IDS.match(raw) is not None


def _is_one_answer(values: Body) -> bool:
    single = (NULL, b"1")
    counts = (raw_of(values, name) for name in ("n", "best_of"))
    return all(count in single for count in counts) and not is_set(
        values, "use_beam_search"
    )


def _is_engines_own(values: Body) -> bool:
    """Whether the engine keeps the history, runs tools, answers later, or cuts
    the prompt to a length that depends on the answer's."""
    if is_set(values, "background") or is_given(values, "previous_response_id"):
        return True
    if raw_of(values, "truncation") not in (NULL, b'"disabled"'):
        return True
    return any(_tool_type(tool) not in _PLAIN_TOOLS for tool in _tools(values))


def _tools(values: Body) -> list[msgspec.Raw]:
    return items_of(values, "tools") or []


class _Tool(msgspec.Struct):
    type: Any = None


def _tool_type(tool: msgspec.Raw) -> str:
    try:
        return str(msgspec.json.decode(tool, type=_Tool).type)
    except (msgspec.DecodeError, RecursionError):
        return ""
