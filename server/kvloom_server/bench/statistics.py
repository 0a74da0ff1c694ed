"""Medians with their spread, and percentiles. Pure."""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    """The smallest."""
    high: float
    """The largest."""
    count: int

    def text(self, digits: int = 0) -> str:
        """``median (low-high)``, or the one value there is."""
        median = f"{self.median:,.{digits}f}"
        if self.count == 1:
            return median
        return f"{median} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def spread(values: Collection[float]) -> Spread:
    """The median of ``values``, and how far they lie apart.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("nothing was measured")
    return Spread(
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        count=len(values),
    )


def percentile(values: Collection[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of ``values`` do not exceed (nearest rank).

    Raises:
        ValueError: there are none, or the share is none.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError("needs values, and a share from 0 to 1")
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)), 1) - 1]
