"""What vLLM loads: ``NixlConnector``, with returns that are safe.

The class keeps the stock class's name because vLLM has special cases for it.
"""

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)

from .scheduler import LeasingScheduler
from .settings import ConnectorSettings
from .stats import LeasePromMetrics, LeaseStats
from .vllm_hooks import check_version
from .worker import LeasedWorker

logger = logging.getLogger("vllm.kvloom")

__all__ = ["NixlConnector"]


class NixlConnector(NixlPullConnector):
    """One engine's half of kvloom: leases on decode, verified pulls on prefill.

    Raises:
        UnsupportedVersionError: this is not a vLLM that kvloom supports.
        SettingsError: ``kv_connector_extra_config`` can't be used.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version()
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.of_extra_config(transfer.kv_connector_extra_config)
        # A failed read is computed locally; "fail" would answer HTTP 500.
        transfer.kv_load_failure_policy = "recompute"
        # Stock code reads the flag itself, and its default is off.
        transfer.kv_connector_extra_config["bidirectional_kv_xfer"] = (
            settings.bidirectional_kv_xfer
        )
        # Past the stock pull connector's own constructor, which would start
        # the stock halves.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            rank = vllm_config.parallel_config.data_parallel_index
            self.connector_scheduler = LeasingScheduler(
                vllm_config,
                self.engine_id,
                kv_cache_config,
                settings=settings.at_rank(rank),
            )
            # vLLM fences freed blocks against a step in flight only where KV
            # arrives asynchronously, and takes that from the role. With returns
            # it arrives on prefill too.
            if settings.bidirectional_kv_xfer and transfer.kv_role == "kv_producer":
                transfer.kv_role = "kv_both"
        else:
            self.connector_worker = LeasedWorker(
                vllm_config, self.engine_id, kv_cache_config, settings=settings
            )

    def get_kv_connector_stats(self) -> Any:
        """What happened since the last step, of this half."""
        if isinstance(self.connector_scheduler, LeasingScheduler):
            return self.connector_scheduler.take_stats()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Stats as they came over from the scheduler's process."""
        return LeaseStats(data=data) if data is not None else LeaseStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """What ``/metrics`` shows of them."""
        return LeasePromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM hands over its cache manager once it exists."""
        super().bind_kv_cache_manager(kv_cache_manager)
        assert isinstance(self.connector_scheduler, LeasingScheduler)
        self.connector_scheduler.bind_kv_cache_manager(kv_cache_manager)
