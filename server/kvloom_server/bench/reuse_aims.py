"""What *auto* is to reach in ``kvloom bench reuse``, and whether it does. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from .results import Row
from .reuse_rows import Cell, Variant, cells, find, floor, one_way

SLACK: Final = 1.10
SLACK_MS: Final = 5.0
"""So much later than one vLLM that lost nothing may the first token be."""
GAIN: Final = 3.3
"""So many times sooner than without returns, where prefill lost its cache: what the
vLLM project published for GLM-5 on 2026-10-12."""
GAIN_TOKENS: Final = 4000
"""From this length of history on."""


def aim_rows(rows: Iterable[Row]) -> list[Row]:
    """A row an aim and cell: *auto*'s median over the turns after the first, and what
    it may be at most, milliseconds. No aim is met with a wrong answer or an error."""
    found = cells(rows)
    return [
        row
        for cell in found
        if cell.variant == Variant.AUTO
        for row in _of(found, cell)
    ]


def _of(found: Sequence[Cell], auto: Cell) -> Iterator[Row]:
    single, off = floor(found, auto), one_way(found, auto)
    stock = find(found, Variant.STOCK, auto.prefill_cache, auto.prefix_tokens)
    bounds = [
        (f"within {SLACK - 1:.0%} and {SLACK_MS:g} ms of single", _near(single)),
        ("no later than stock", _median(stock)),
    ]
    if auto.prefill_cache == "lost" and auto.prefix_tokens >= GAIN_TOKENS:
        bounds.append((f"{GAIN:g} times sooner than off", _gained(off)))
    own = _median(auto)
    for aim, bound in bounds:
        if bound is None or own is None:
            continue
        yield {
            "row": "reuse_aim",
            "aim": aim,
            "prefill_cache": auto.prefill_cache,
            "prefix_tokens": auto.prefix_tokens,
            "auto_ms": own,
            "bound_ms": bound,
            "is_met": own <= bound and not (auto.wrong or auto.errors),
        }


def _median(cell: Cell | None) -> float | None:
    return None if cell is None or cell.ttft is None else cell.ttft.median


def _near(single: Cell | None) -> float | None:
    median = _median(single)
    return None if median is None else SLACK * median + SLACK_MS


def _gained(off: Cell | None) -> float | None:
    median = _median(off)
    return None if median is None else median / GAIN
