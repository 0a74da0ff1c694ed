"""The rows of ``kvloom bench reuse``, and what they come to. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from kvloom.protocol import PlanKind

from .heard import common_prefix_len
from .results import Row
from .statistics import Spread, spread
from .ways import Asked

PrefillCache = Literal["kept", "lost"]


class Variant(StrEnum):
    """Who serves a conversation."""

    SINGLE = "single"
    """One vLLM with its prefix cache, asked without any router: the floor."""
    OFF = "off"
    """Prefill and decode, one way."""
    STOCK = "stock"
    """vLLM's own bidirectional transfer, driven as its multi-turn example does."""
    RIVAL = "rival"
    """vllm-router with program scheduling, over the same stock engines."""
    LAZY = "lazy"
    EAGER = "eager"
    DIRECT = "direct"
    """Decode does alone what it can; *lazy* otherwise."""
    AUTO = "auto"
    """The router decides all of it."""


STOCK_ENGINES: Final = frozenset({Variant.STOCK, Variant.RIVAL})
"""They need a pair with vLLM's own connector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a prompt's tokens came from."""

    local: int
    """The prefix cache of the engine that did the prefill."""
    returned: int
    """Pulled from decode."""
    computed: int


def sources(asked: Asked, variant: Variant) -> Sources:
    """Of one turn. Where no prefill engine took part (one vLLM, a direct turn) they
    are what the answering engine's usage says; where the router is not ours, what
    prefill's metrics say."""
    heard, plan = asked.heard, asked.plan
    prompt = len(heard.prompt_ids)
    if variant in STOCK_ENGINES:
        local = round(asked.done.prefill.local_tokens)
        returned = round(asked.done.prefill.returned_tokens)
        return Sources(
            local=local, returned=returned, computed=prompt - local - returned
        )
    if plan is None or plan.plan is PlanKind.DIRECT or plan.computed_tokens is None:
        local = heard.cached_tokens or 0
        return Sources(local=local, returned=0, computed=prompt - local)
    return Sources(
        local=plan.local_tokens or 0,
        returned=plan.returned_tokens or 0,
        computed=plan.computed_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which turn of which conversation."""

    variant: Variant
    prefill_cache: PrefillCache
    conversation: str
    prefix_tokens: int
    turn: int
    """From 1."""

    def fields(self) -> Row:
        return {
            "row": "reuse",
            "variant": self.variant.value,
            "prefill_cache": self.prefill_cache,
            "conversation": self.conversation,
            "prefix_tokens": self.prefix_tokens,
            "turn": self.turn,
        }


def turn_row(
    place: Place, asked: Asked, *, history: Sequence[int], truth: Sequence[int]
) -> Row:
    """One measured turn.

    Args:
        place: where it belongs.
        asked: the answer.
        history: token ids of the turn before, prompt and answer.
        truth: token ids of the right answer.
    """
    heard, plan = asked.heard, asked.plan
    assert heard.ttft_s is not None, "a turn without an answer has no row of its own"
    found = sources(asked, place.variant)
    return place.fields() | {
        "history_tokens": len(history),
        "ttft_ms": heard.ttft_s * 1e3,
        "prompt_tokens": len(heard.prompt_ids),
        "common_tokens": common_prefix_len(history, heard.prompt_ids),
        "local_tokens": found.local,
        "returned_tokens": found.returned,
        "computed_tokens": found.computed,
        "moved_bytes": round(
            asked.done.prefill.moved_bytes + asked.done.decode.moved_bytes
        ),
        "moved_ms": 1e3 * (asked.done.prefill.moved_s + asked.done.decode.moved_s),
        "wrong": list(truth) != heard.token_ids,
        "answer_tokens": len(heard.token_ids),
        "plan": plan.plan.value if plan else None,
        "reason": plan.reason.value if plan else None,
        "error": None,
    }


def error_row(place: Place, error: str) -> Row:
    """A turn that was not answered."""
    return place.fields() | {"ttft_ms": None, "wrong": False, "error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one variant did with one length of history.

    Times and counts are of turns after the first, wrong answers and errors of all.
    """

    variant: str
    prefill_cache: str
    prefix_tokens: int
    ttft: Spread | None
    """Milliseconds; ``None`` where no such turn was answered."""
    local: int
    returned: int
    computed: int
    moved_kb: int | None
    """KV that went from engine to engine, both ways; files from before that was
    counted do not tell."""
    moved_ms: int | None
    """How long that took, all transfers of a turn together."""
    reuse: float
    """Tokens that were not computed, of those that need not have been: the common
    prefix, but for the last token of a prompt, which is always computed."""
    wrong: int
    errors: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.variant, self.prefill_cache, self.prefix_tokens


def cells(rows: Iterable[Row]) -> list[Cell]:
    """Every cell of a file's rows, in the order in which they appear."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row["row"] == "reuse":
            key = (row["variant"], row["prefill_cache"], row["prefix_tokens"])
            groups.setdefault(key, []).append(row)
    return [_cell(key, group) for key, group in groups.items()]


def _cell(key: tuple[str, str, int], group: Sequence[Row]) -> Cell:
    answered = [row for row in group if row["error"] is None]
    later = [row for row in answered if row["turn"] > 1]
    times = [row["ttft_ms"] for row in later]
    reusable = sum(min(row["common_tokens"], row["prompt_tokens"] - 1) for row in later)
    reused = sum(row["local_tokens"] + row["returned_tokens"] for row in later)
    variant, cache, prefix = key
    return Cell(
        variant=variant,
        prefill_cache=cache,
        prefix_tokens=prefix,
        ttft=spread(times) if times else None,
        local=_mean(later, "local_tokens"),
        returned=_mean(later, "returned_tokens"),
        computed=_mean(later, "computed_tokens"),
        moved_kb=_moved(later, "moved_bytes", per=1e3),
        moved_ms=_moved(later, "moved_ms"),
        reuse=reused / max(reusable, 1),
        wrong=sum(row["wrong"] for row in answered),
        errors=len(group) - len(answered),
    )


def _mean(rows: Sequence[Row], name: str) -> int:
    return round(statistics.fmean(row[name] for row in rows)) if rows else 0


def _moved(rows: Sequence[Row], name: str, *, per: float = 1.0) -> int | None:
    if not all(name in row for row in rows):
        return None
    return round(_mean(rows, name) / per)


def floor(found: Sequence[Cell], cell: Cell) -> Cell | None:
    """*single* at the same length: one vLLM has lost nothing, whatever prefill has."""
    return find(found, Variant.SINGLE, "kept", cell.prefix_tokens)


def one_way(found: Sequence[Cell], cell: Cell) -> Cell | None:
    """*off* in the same case at the same length."""
    return find(found, Variant.OFF, cell.prefill_cache, cell.prefix_tokens)


def find(found: Sequence[Cell], *key: Any) -> Cell | None:
    """The cell of this variant, prefill cache and length."""
    return next((cell for cell in found if cell.key == key), None)


def summary_rows(rows: Iterable[Row]) -> list[Row]:
    """A row a cell, with its ratios: what the terminal and the document show."""
    found = cells(rows)
    return [_summary(found, cell) for cell in found]


def _summary(found: Sequence[Cell], cell: Cell) -> Row:
    return {
        "row": "reuse_summary",
        "prefill_cache": cell.prefill_cache,
        "prefix_tokens": cell.prefix_tokens,
        "variant": cell.variant,
        "ttft": cell.ttft.text() if cell.ttft else None,
        "times_off": _ratio(one_way(found, cell), cell),
        "times_single": _ratio(cell, floor(found, cell)),
        "local_tokens": cell.local,
        "returned_tokens": cell.returned,
        "computed_tokens": cell.computed,
        "moved_kb": cell.moved_kb,
        "moved_ms": cell.moved_ms,
        "reuse": f"{100 * cell.reuse:.0f} %",
        "wrong": cell.wrong,
        "errors": cell.errors,
    }


def _ratio(slow: Cell | None, fast: Cell | None) -> str | None:
    if slow is None or fast is None or slow.ttft is None or fast.ttft is None:
        return None
    return f"{slow.ttft.median / fast.ttft.median:.2f}"
