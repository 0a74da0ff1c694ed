"""What an engine has done so far, by its own metrics: tokens reused, KV moved.

Turns are asked one at a time, so that what was added during one is that turn's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, Self

import aiohttp

_LOCAL: Final = "vllm:prefix_cache_hits_total"
_RETURNED: Final = "vllm:external_prefix_cache_hits_total"
_BYTES: Final = "vllm:nixl_bytes_transferred_sum"
_SECONDS: Final = "vllm:nixl_xfer_time_seconds_sum"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"
_EVENTS: Final = "vllm:kvloom_lease_events_total"
_EVICTED: Final = '="evicted"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Of one engine, since it started or since others were read."""

    local_tokens: float = 0.0
    """Found in its own prefix cache."""
    returned_tokens: float = 0.0
    """Read from another engine."""
    moved_bytes: float = 0.0
    """Of KV that it read from others."""
    moved_s: float = 0.0
    preemptions: float = 0.0
    """Requests that gave their blocks up and began again."""
    evictions: float = 0.0
    """Leases that were given up for room."""

    def since(self, before: Self) -> "Counters":
        """What was added after ``before``."""
        return Counters(
            **{
                f.name: getattr(self, f.name) - getattr(before, f.name)
                for f in fields(self)
            }
        )


def counters_of(metrics: str) -> Counters:
    """Out of the text of ``/metrics``; a series that is not there counts nothing."""
    found: dict[str, float] = {}
    for name, labels, value in _series(metrics):
        if name != _EVENTS or _EVICTED in labels:
            found[name] = found.get(name, 0.0) + value
    return Counters(
        local_tokens=found.get(_LOCAL, 0.0),
        returned_tokens=found.get(_RETURNED, 0.0),
        moved_bytes=found.get(_BYTES, 0.0),
        moved_s=found.get(_SECONDS, 0.0),
        preemptions=found.get(_PREEMPTIONS, 0.0),
        evictions=found.get(_EVENTS, 0.0),
    )


def _series(metrics: str) -> Iterator[tuple[str, str, float]]:
    for line in metrics.splitlines():
        if line.startswith("vllm:"):
            named, _, value = line.rpartition(" ")
            name, _, labels = named.partition("{")
            yield name, labels, float(value)


async def read_counters(http: aiohttp.ClientSession, url: str) -> Counters:
    """Of the engine at ``url``, now.

    Raises:
        aiohttp.ClientError: it does not tell.
    """
    async with http.get(f"{url}/metrics") as response:
        response.raise_for_status()
        return counters_of(await response.text())
