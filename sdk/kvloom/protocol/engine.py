"""What the router and the connector tell each other inside engine requests.

All of it sits under one key, ``kvloom``, of vLLM's ``kv_transfer_params``; the
stock keys beside it (``do_remote_decode`` …) are vLLM's. Clients never see any
of this, and the router never lets a client's own params through.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ENGINE_KEY: Final = "kvloom"

PROMPT_IDS: Final = "prompt_token_ids"
"""vLLM's own key: a prompt's token ids, taken in place of rendering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRef:
    """Where a lease is: all that a prefill engine needs to claim it."""

    lease_id: str
    address: str
    """The decode engine's lease service, ``tcp://host:port``."""

    def as_json(self) -> dict[str, Any]:
        return {"lease_id": self.lease_id, "address": self.address}

    @classmethod
    def of_json(cls, value: object) -> "LeaseRef | None":
        """The reference in decoded JSON, or ``None`` when it is malformed."""
        match value:
            case {"lease_id": str(lease_id), "address": str(address)}:
                return cls(lease_id=lease_id, address=address)
            case _:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRef:
    """A prompt that a prefill engine is computing: what decode waits for."""

    name: str
    """The one that the prefill leg was sent with."""
    address: str
    """The prefill engine's lease service, ``tcp://host:port``."""

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "address": self.address}

    @classmethod
    def of_json(cls, value: object) -> "PromptRef | None":
        """The reference in decoded JSON, or ``None`` when it is malformed."""
        match value:
            case {"name": str(name), "address": str(address)}:
                return cls(name=name, address=address)
            case _:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutcome:
    """What prefill did with one prompt, counted by its scheduler in tokens."""

    local_tokens: int
    returned_tokens: int
    why: str | None = None
    """A :class:`~kvloom.protocol.Reason` when a lease was offered but not
    pulled."""

    def as_json(self) -> dict[str, Any]:
        return {
            "local_tokens": self.local_tokens,
            "returned_tokens": self.returned_tokens,
            "why": self.why,
        }

    @classmethod
    def of_json(cls, value: object) -> "PrefillOutcome | None":
        """The outcome in decoded JSON, or ``None`` when it is malformed."""
        # Asked once a turn; a match over mappings would take ten times as long.
        if not isinstance(value, dict) or "why" not in value:
            return None
        local, returned = value.get("local_tokens"), value.get("returned_tokens")
        why = value["why"]
        if not isinstance(local, int) or not isinstance(returned, int):
            return None
        if why is not None and not isinstance(why, str):
            return None
        return cls(local_tokens=local, returned_tokens=returned, why=why)


def prefill_params(
    lease: LeaseRef | None,
    *,
    announce_as: str | None = None,
    min_tokens: int | None = None,
    is_warm_up: bool = False,
    prompt_ids: object = None,
) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill leg.

    Args:
        lease: what to pull.
        announce_as: the name under which a decode engine waits for the prompt.
        min_tokens: fewer tokens than this are computed, not pulled; ``None``
            leaves it to the engine's ``kv_recompute_threshold``.
        is_warm_up: no decode leg follows: prefill keeps nothing for one.
        prompt_ids: the prompt's token ids, in place of what the messages render
            to; a list, or whatever encodes as one.
    """
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if prompt_ids is not None:
        params[PROMPT_IDS] = prompt_ids
    ours: dict[str, Any] = {}
    if lease is not None:
        ours["lease"] = lease.as_json()
        if min_tokens is not None:
            ours["min_tokens"] = min_tokens
    if announce_as is not None:
        ours["announce_as"] = announce_as
    if is_warm_up:
        ours["is_warm_up"] = True
    if ours:
        params[ENGINE_KEY] = ours
    return params


def decode_params(
    prefilled: Mapping[str, Any] | None,
    *,
    turn_id: str | None,
    expected_return_s: float | None = None,
    awaited: PromptRef | None = None,
    prompt_ids: object = None,
    tells_answer: bool = False,
) -> dict[str, Any] | None:
    """``kv_transfer_params`` of a decode leg.

    Args:
        prefilled: what the prefill engine answered, or ``None`` where decode
            computes the prompt itself.
        turn_id: asks for a lease of that name when the turn ends; ``None``
            asks for none.
        expected_return_s: how long after this turn's end the next one is
            expected, seconds; ``None``: nobody knows.
        awaited: a prompt that prefill has not answered yet; decode then waits
            for it itself, in place of ``prefilled``.
        prompt_ids: as in :func:`prefill_params`.
        tells_answer: the lease is announced with the ids of what was generated.
    """
    params = {k: v for k, v in (prefilled or {}).items() if k != ENGINE_KEY}
    mark = prompt_mark_of(prefilled or {})
    ours = {
        "turn_id": turn_id,
        "expected_return_s": expected_return_s,
        "prompt_mark": mark,
        "confirm_at": confirm_at_of(prefilled or {}),
        "awaited": None if awaited is None else awaited.as_json(),
        "tell_answer": True if turn_id is not None and tells_answer else None,
    }
    ours = {name: value for name, value in ours.items() if value is not None}
    if ours:
        params[ENGINE_KEY] = ours
    if prompt_ids is not None:
        params[PROMPT_IDS] = prompt_ids
    return params or None


def handover(
    stock: Mapping[str, Any],
    *,
    outcome: PrefillOutcome | None,
    prompt_mark: str | None,
    confirm_at: str | None = None,
) -> dict[str, Any]:
    """What a prefill engine answers: vLLM's own params, and what we add.

    Args:
        stock: what decode needs to read the blocks.
        outcome: what became of the prompt, for the router.
        prompt_mark: a digest of the prompt as prefill saw it. Decode compares
            it with its own, because it reads the blocks by position.
        confirm_at: prefill's lease service, which decode asks after its read.
    """
    ours: dict[str, Any] = {} if outcome is None else outcome.as_json()
    ours |= {"prompt_mark": prompt_mark, "confirm_at": confirm_at}
    return {**stock, ENGINE_KEY: ours}


def lease_of(params: Mapping[str, Any]) -> LeaseRef | None:
    """The lease that a prefill leg is to pull."""
    ours = params.get(ENGINE_KEY)
    return LeaseRef.of_json(ours.get("lease")) if isinstance(ours, Mapping) else None


def announce_as_of(params: Mapping[str, Any]) -> str | None:
    """The name under which a decode engine waits for this prompt."""
    return _text_of(params, "announce_as")


def awaited_of(params: Mapping[str, Any]) -> PromptRef | None:
    """The prompt that a decode leg waits for."""
    ours = params.get(ENGINE_KEY)
    return PromptRef.of_json(ours.get("awaited")) if isinstance(ours, Mapping) else None


def min_tokens_of(params: Mapping[str, Any]) -> int | None:
    """The fewest tokens that a prefill leg is to pull; 1 or more."""
    ours = params.get(ENGINE_KEY)
    least = ours.get("min_tokens") if isinstance(ours, Mapping) else None
    if not isinstance(least, int) or isinstance(least, bool):
        return None
    return max(least, 1)


def is_warm_up(params: Mapping[str, Any]) -> bool:
    """Whether no decode leg follows a prefill leg."""
    ours = params.get(ENGINE_KEY)
    return isinstance(ours, Mapping) and ours.get("is_warm_up") is True


def turn_of(params: Mapping[str, Any]) -> str | None:
    """The name under which a decode leg's lease is to be granted."""
    return _text_of(params, "turn_id")


def tells_answer(params: Mapping[str, Any]) -> bool:
    """Whether a decode leg's lease is to be announced with the answer's ids."""
    ours = params.get(ENGINE_KEY)
    return isinstance(ours, Mapping) and ours.get("tell_answer") is True


def expected_return_of(params: Mapping[str, Any]) -> float | None:
    """How long after a decode leg's end the next turn is expected, seconds."""
    ours = params.get(ENGINE_KEY)
    wait_s = ours.get("expected_return_s") if isinstance(ours, Mapping) else None
    if not isinstance(wait_s, int | float) or isinstance(wait_s, bool):
        return None
    return float(wait_s) if 0 <= wait_s < math.inf else None


def prompt_mark_of(params: Mapping[str, Any]) -> str | None:
    """The digest of the prompt that prefill computed."""
    return _text_of(params, "prompt_mark")


def confirm_at_of(params: Mapping[str, Any]) -> str | None:
    """The lease service of the prefill engine that computed the prompt."""
    return _text_of(params, "confirm_at")


def _text_of(params: Mapping[str, Any], name: str) -> str | None:
    ours = params.get(ENGINE_KEY)
    text = ours.get(name) if isinstance(ours, Mapping) else None
    return text if isinstance(text, str) and text else None


def outcome_of(params: Mapping[str, Any]) -> PrefillOutcome | None:
    """What the prefill engine reported beside its transfer params."""
    return PrefillOutcome.of_json(params.get(ENGINE_KEY))
