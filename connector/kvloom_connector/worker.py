"""The worker half: stock reads and writes, some faults mended.

No read counts before it is proved; NIXL's progress thread gets a pause where it
would take a core from the model; the model keeps its cores; reads of leases are
not reported as reads of unknown requests.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)

from .proofs import ProofDesk
from .reading import READ_MARK
from .settings import ConnectorSettings
from .stats import EXPIRED_SENDS, LeaseStats
from .vllm_hooks import bound_cores, is_on_cpu

CPU_PROGRESS_DELAY_US = 1000


class LeasedWorker(NixlPullConnectorWorker):
    """Stock pull worker of an engine that leases.

    Args:
        vllm_config: vLLM's configuration.
        engine_id: this engine's id for NIXL.
        kv_cache_config: vLLM's KV-cache layout.
        settings: ours.
    """

    def __init__(
        self,
        vllm_config: Any,
        engine_id: str,
        kv_cache_config: Any,
        *,
        settings: ConnectorSettings,
    ) -> None:
        delay_us = settings.nixl_progress_delay_us
        if delay_us is None and is_on_cpu():
            delay_us = CPU_PROGRESS_DELAY_US
        with _progress_delay(delay_us), _own_cores():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._proofs = ProofDesk(cluster_key=settings.cluster_key())
        # Added to the scheduler's, which count leases too.
        self.xfer_stats = LeaseStats()
        agent = self.nixl_wrapper
        take_notifs = agent.get_new_notifs
        agent.get_new_notifs = lambda *a, **k: _without_reads(take_notifs(*a, **k))

    def start_load_kv(self, metadata: Any) -> None:
        """Begin the reads of this step."""
        for request_id, proof in metadata.kvloom_reads.items():
            self._proofs.expect(request_id, proof)
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> Any:
        """Reads that are over and proved to be good, and those that failed."""
        results = super().get_transfer_results()
        self._proofs.sift(results.finished_recving, results.failed_recving)
        return results

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        read = set(done_sending)
        super()._reap_expired_send_leases(done_sending)
        self.xfer_stats.data[EXPIRED_SENDS] += sorted(done_sending - read)

    def shutdown(self) -> None:
        """Close what this half opened; stock shutdown after."""
        self._proofs.close()
        super().shutdown()


def _without_reads(notifs: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
    """Leases end by the lease service; a read's own notice says nothing new."""
    mark = READ_MARK.encode()
    return {
        agent: [notif for notif in sent if not notif.startswith(mark)]
        for agent, sent in notifs.items()
    }


@contextmanager
def _own_cores() -> Iterator[None]:
    """The model keeps the cores that it was given.

    On CPU the stock worker moves its thread, which is the model's, to the last
    core of the machine: there all engines of a small host would meet.
    """
    if not is_on_cpu():
        yield
        return
    cores = bound_cores() or os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _progress_delay(delay_us: int | None) -> Iterator[None]:
    """Agents made in here pause their progress thread between polls.

    NIXL's Python API sets no pause and offers no setting for it, so the
    binding's constructor is wrapped while the agent is made.
    """
    if delay_us is None:
        yield
        return
    import importlib

    from vllm.distributed.nixl_utils import NixlWrapper

    bindings = importlib.import_module(NixlWrapper.__module__).nixlBind
    make_agent = bindings.nixlAgent

    def make_patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    bindings.nixlAgent = make_patient_agent
    try:
        yield
    finally:
        bindings.nixlAgent = make_agent
