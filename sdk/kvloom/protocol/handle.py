"""What the client carries between turns, as the client sees it.

A handle is a sealed token in ``kv_transfer_params``. Only the router can open
it; a client stores it and sends it back, nothing more. Anything else in
``kv_transfer_params`` is refused, because vLLM obeys such params as they come.
"""

import re
from collections.abc import Mapping
from typing import Final

KV_TRANSFER_PARAMS: Final = "kv_transfer_params"
"""The key of a request or answer that carries the handle (vLLM's own name)."""

HANDLE_KEY: Final = "kvloom"
"""The only key that a client may send inside ``kv_transfer_params``."""

MAX_HANDLE_CHARS: Final = 256

_HANDLE = re.compile(r"kvl1\.[A-Za-z0-9_-]{16,250}")


class RawTransferParamsError(ValueError):
    """A client sent transfer params that are not a sealed handle of ours."""


def carry(handle: str) -> dict[str, str]:
    """The value of ``kv_transfer_params`` that carries ``handle``."""
    return {HANDLE_KEY: handle}


def carried(params: object) -> str | None:
    """The sealed handle in a request's ``kv_transfer_params``, if there is one.

    Args:
        params: the decoded JSON value; ``None`` and an empty object carry
            nothing.

    Raises:
        RawTransferParamsError: it holds anything but a sealed handle.
    """
    if params is None or params == {}:
        return None
    if isinstance(params, Mapping) and set(params) == {HANDLE_KEY}:
        handle = params[HANDLE_KEY]
        if isinstance(handle, str) and is_handle(handle):
            return handle
    raise RawTransferParamsError(
        f"{KV_TRANSFER_PARAMS} may hold only the handle of an earlier answer, "
        f'as {{"{HANDLE_KEY}": "kvl1.…"}}; send it back unchanged or leave it out'
    )


def offered(params: object) -> str | None:
    """The sealed handle in an answer, or ``None`` for whatever else is there.

    A foreign server's answer is no error to a client: it is no handle.
    """
    try:
        return carried(params)
    except RawTransferParamsError:
        return None


def is_handle(value: str) -> bool:
    """Whether ``value`` has the form of a sealed handle (its seal unread)."""
    return len(value) <= MAX_HANDLE_CHARS and _HANDLE.fullmatch(value) is not None
