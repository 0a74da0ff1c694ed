"""What leases and returns add to vLLM's own metrics, under ``vllm:kvloom_``.

vLLM carries a connector's stats from the scheduler to the process that serves
``/metrics`` as one dictionary of lists, once a step; an idle engine sends none.
"""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

LEASES = "kvloom_leases"
LEASED_BLOCKS = "kvloom_leased_blocks"
LEASE_EVENTS = "kvloom_lease_events"
RETURNS = "kvloom_returns"
RETURNED_TOKENS = "kvloom_returned_tokens"
EXPIRED_SENDS = "kvloom_expired_sends"
"""Not a metric: hand-overs whose time was over before decode read them, from
the worker to the scheduler."""
_OURS = (EXPIRED_SENDS, LEASES, LEASED_BLOCKS, LEASE_EVENTS, RETURNS, RETURNED_TOKENS)


class LeaseStats(NixlKVConnectorStats):
    """NIXL's transfer stats, and what leases and returns did since the last step."""

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in _OURS})

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data.get(key) for key in _OURS)

    def leases(self, *, live: int, blocks: int) -> None:
        """How many leases live, and how many distinct blocks they hold."""
        self.data[LEASES].append(live)
        self.data[LEASED_BLOCKS].append(blocks)

    def events(self, tally: "Counter[tuple[str, str]]") -> None:
        """State changes of leases: how often each, and why."""
        self.data[LEASE_EVENTS] += [
            [state, why, count] for (state, why), count in tally.items()
        ]

    def returned(self, *, why: str, num_tokens: int) -> None:
        """One prompt that was offered a lease; ``why`` nothing came, or empty."""
        self.data[RETURNS].append(why or "returned")
        self.data[RETURNED_TOKENS].append(num_tokens)

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log line."""
        reduced: dict[str, int | float] = super().reduce()
        if self.data[LEASES]:
            reduced["Leases"] = self.data[LEASES][-1]
            reduced["Leased blocks"] = self.data[LEASED_BLOCKS][-1]
        if self.data[RETURNS]:
            reduced["Returned tokens"] = sum(self.data[RETURNED_TOKENS])
        return reduced


class LeasePromMetrics(NixlPromMetrics):
    """NIXL's Prometheus metrics and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._leases = self._gauge_cls(
            name="vllm:kvloom_leases",
            documentation="Leases that live on this decode engine.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._leased_blocks = self._gauge_cls(
            name="vllm:kvloom_leased_blocks",
            documentation="Distinct KV blocks that leases hold.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._lease_events = self._counter_cls(
            name="vllm:kvloom_lease_events",
            documentation="State changes of leases, and why.",
            labelnames=[*labelnames, "state", "reason"],
        )
        self._returns = self._counter_cls(
            name="vllm:kvloom_returns",
            documentation="Prompts that were offered a lease, by what came of it.",
            labelnames=[*labelnames, "outcome"],
        )
        self._returned_tokens = self._counter_cls(
            name="vllm:kvloom_returned_tokens",
            documentation="Prompt tokens whose KV came from a decode engine.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count one step's stats."""
        super().observe(transfer_stats_data, engine_idx)
        engine = self.per_engine_labelvalues[engine_idx]
        for live in transfer_stats_data.get(LEASES, ()):
            self._leases.labels(*engine).set(live)
        for blocks in transfer_stats_data.get(LEASED_BLOCKS, ()):
            self._leased_blocks.labels(*engine).set(blocks)
        for state, why, count in transfer_stats_data.get(LEASE_EVENTS, ()):
            self._lease_events.labels(*engine, state, why).inc(count)
        for outcome in transfer_stats_data.get(RETURNS, ()):
            self._returns.labels(*engine, outcome).inc()
        for num_tokens in transfer_stats_data.get(RETURNED_TOKENS, ()):
            self._returned_tokens.labels(*engine).inc(num_tokens)


def expired_sends(stats: Any) -> set[str]:
    """Hand-overs that the worker reported as given up in this step."""
    if not isinstance(stats, LeaseStats):
        return set()
    expired, stats.data[EXPIRED_SENDS] = stats.data[EXPIRED_SENDS], []
    return set(expired)
