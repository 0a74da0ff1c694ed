"""The scheduler half: leases on decode, verified returns on prefill."""

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvloom.protocol import (
    ENGINE_KEY,
    announce_as_of,
    awaited_of,
    handover,
    is_warm_up,
    lease_of,
    min_tokens_of,
    prompt_mark_of,
    turn_of,
)

from .announcements import Announcements
from .awaits import AwaitDesk, Ended
from .claims import ClaimDesk
from .digest import ladder
from .handovers import Handovers
from .leasing import LeaseDesk, open_service
from .mail import PeerMail
from .peers import tcp_address
from .proofs import ReadProof
from .reading import proof_of, read_params
from .returns import Prompt, Pull, ReturnDesk, StillAskingError
from .service import EngineIdentity, LeaseService
from .settings import ConnectorSettings, service_port
from .stats import LeaseStats, expired_sends
from .vllm_hooks import (
    NixlPullConnectorScheduler,
    extra_digests,
    prompt_mark,
    spare_lookups,
)

logger = logging.getLogger("vllm.kvloom")

IDLE_NAP_S = 0.002
"""How long an engine with nothing to compute waits for an answer at a time: long
enough not to spin, too short to be felt."""

# What makes stock prefill read remote blocks; only a verified claim sets them.
_REMOTE_KEYS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
)


class LeasingScheduler(NixlPullConnectorScheduler):
    """Stock pull scheduling for prefill → decode; our own way back.

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
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._settings = settings
        self._is_decode = bool(vllm_config.kv_transfer_config.is_kv_consumer)
        self._leases: LeaseDesk | None = None
        self._service: LeaseService | None = None
        self._handovers = Handovers()
        self._announcements = Announcements()
        self._reads: dict[str, ReadProof] = {}
        self._mail = PeerMail(cluster_key=settings.cluster_key())
        self._awaits = AwaitDesk(self._mail)
        self._returns = ReturnDesk(
            ClaimDesk(self._mail, lifetime_s=settings.claim_lifetime_s),
            block_size=self.block_size,
            threshold=settings.kv_recompute_threshold,
            claim_timeout_s=settings.claim_timeout_s,
        )
        self._num_local: dict[str, int] = {}
        self._stats = LeaseStats()

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Open the lease service; on decode take over the blocks' references."""
        spare_lookups(manager, self._is_awaiting)
        parallel = self.vllm_config.parallel_config
        identity = EngineIdentity(
            engine_id=self.engine_id,
            host=self.side_channel_host,
            port=self.side_channel_port,
            tp_size=self.transfer_tp_size,
            dcp_size=parallel.decode_context_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            block_size=self.block_size,
        )
        if self._is_decode and self._settings.bidirectional_kv_xfer:
            self._leases = LeaseDesk(
                manager,
                identity,
                settings=self._settings,
                handovers=self._handovers,
                announcements=self._announcements,
            )
        else:
            self._service = open_service(
                identity,
                settings=self._settings,
                handovers=self._handovers,
                announcements=self._announcements,
            )

    # ── a turn arrives ───────────────────────────────────────────────────────

    def on_new_request(self, request: Any) -> None:
        """Drop what could make stock code read blocks that nobody verified, and
        begin to wait for what is still being computed."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            for key in _REMOTE_KEYS:
                params.pop(key, None)
            name = announce_as_of(params)
            if name is not None:
                self._announcements.expect(name)
        awaited = awaited_of(params)
        is_alone = awaited is None and not params.get("do_remote_prefill")
        if is_alone and self._leases is not None:
            self._leases.does_alone(request)
        if awaited is not None and not params.get("do_remote_decode"):
            params.pop("do_remote_prefill", None)
            self._awaits.begin(request, awaited, now=time.monotonic())
        self._accept_handover(request, params)
        super().on_new_request(request)

    def _accept_handover(self, request: Any, params: dict[str, Any]) -> None:
        """Of another prompt than this one nothing is read."""
        if params.get("do_remote_prefill") and not self._is_same_prompt(request):
            logger.warning(
                "prefill and decode made different prompts of one request, so decode "
                "computes its own: do their flags for tools and templates differ?"
            )
            self._decline_handover(request, params)

    def _is_same_prompt(self, request: Any) -> bool:
        """Whether prefill computed this prompt; stock prefill does not say."""
        mark = prompt_mark_of(request.kv_transfer_params)
        return mark is None or mark == prompt_mark(request)

    def _decline_handover(self, request: Any, params: dict[str, Any]) -> None:
        # As stock code does for a request that is aborted early: nothing to
        # read, but prefill is told that it can free the blocks.
        self._reqs_need_recv[request.request_id] = (request, [], (), False)
        params["do_remote_prefill"] = False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded from elsewhere; ``None``: ask again."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            if self._awaits.waits(request.request_id):
                return None, False
            if self._leases is not None:
                self._leases.found(request, num_computed_tokens)
            return self._handed_over(request, num_computed_tokens)
        if not request.num_preemptions:
            # Later it finds what it has computed or read before.
            self._num_local[request.request_id] = num_computed_tokens
        try:
            pull = self._plan_pull(request, params, num_computed_tokens)
        except StillAskingError:
            return None, False
        if pull is None:
            return 0, False
        params.update(read_params(pull, self.block_size))
        return pull.num_tokens - num_computed_tokens, True

    def _is_awaiting(self, request: Any) -> bool:
        """On decode: whether prefill still computes the prompt, as of now."""
        request_id = request.request_id
        if not self._awaits.waits(request_id):
            return False
        ended = self._awaits.look(request_id, now=time.monotonic())
        if ended is None:
            return True
        self._take_in(ended)
        return False

    def _take_in(self, ended: Ended) -> None:
        """What prefill announced counts as if it had come with the request."""
        if ended.params is None:
            return
        if ended.request is None:
            # Nothing to read, but prefill is told that it can free the blocks.
            unread = SimpleNamespace(kv_transfer_params=ended.params)
            self._reqs_need_recv[f"{ended.request_id}-unread"] = (unread, [], (), False)
            return
        params = ended.request.kv_transfer_params
        ours = {**ended.params[ENGINE_KEY], **params[ENGINE_KEY]}
        params.update(ended.params, **{ENGINE_KEY: ours})
        self._accept_handover(ended.request, params)
        super().on_new_request(ended.request)

    def _handed_over(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """On decode: what prefill computed, where pulling it saves enough."""
        num_tokens, is_async = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if 0 < num_tokens < self._settings.handover_recompute_threshold:
            self._decline_handover(request, request.kv_transfer_params)
            return 0, False
        return num_tokens, is_async

    def _plan_pull(
        self, request: Any, params: dict[str, Any], num_local: int
    ) -> Pull | None:
        now = time.monotonic()
        request_id = request.request_id
        if not self._returns.knows(request_id):
            ref = lease_of(params)
            if ref is None or not self._can_return(request):
                return None
            self._returns.begin(
                request_id,
                ref,
                self._prove(request),
                now=now,
                min_tokens=min_tokens_of(params),
            )
        return self._returns.look(request_id, num_local=num_local, now=now)

    def _can_return(self, request: Any) -> bool:
        """Whether this engine and this request take returned blocks at all."""
        return (
            self._settings.bidirectional_kv_xfer
            and self._is_plain
            and not self.use_host_buffer
            and bool(request.prompt_token_ids)
            and request.num_preemptions == 0
        )

    @property
    def _is_plain(self) -> bool:
        """Full attention only: any prefix of a sequence's blocks is of use."""
        return not self._is_hma_required and not self._has_mamba

    def _prove(self, request: Any) -> Prompt:
        tokens: Sequence[int] = request.prompt_token_ids
        extras = extra_digests(
            request, num_tokens=len(tokens), block_size=self.block_size
        )
        digests = ladder(tokens, block_size=self.block_size, extras=extras)
        return Prompt(tokens=tokens, digests=digests, extras=extras)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """The scheduler took the request in."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params or {}
        proof = proof_of(params) if num_external_tokens else None
        if proof is not None:
            self._reads[request.request_id] = proof
        if params.get("do_remote_decode"):
            # Called once more, with nothing to count, when a read is over.
            num_local = self._num_local.pop(request.request_id, None)
            if num_local is not None:
                self._returns.admitted(
                    request.request_id,
                    num_local=num_local,
                    num_pulled=num_external_tokens,
                )
        else:
            # Stock code would have its worker report such a request as sent.
            self._reqs_in_batch.discard(request.request_id)

    def update_connector_output(self, connector_output: Any) -> None:
        """Reads that ended, well or not, end their claims; so do hand-overs."""
        super().update_connector_output(connector_output)
        self._handovers.expire(expired_sends(connector_output.kv_connector_stats))
        for request_id in connector_output.finished_sending or ():
            self._handovers.end(request_id)
        for request_id in connector_output.finished_recving or ():
            self._returns.read_done(request_id)

    # ── a turn ends ──────────────────────────────────────────────────────────

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand over (prefill), or lease (decode) what the request leaves."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_decode"):
            return self._finish_prefill(request, block_ids)
        self._awaits.forget(request.request_id, now=time.monotonic())
        if params.get("do_remote_prefill"):
            # Aborted before it was scheduled: stock code frees prefill's blocks.
            super().request_finished(request, block_ids)
        self._stop_heartbeat(request.request_id)
        turn_id = turn_of(params)
        if turn_id is not None and self._leases is not None:
            is_plain = self._is_plain and len(block_ids) == 1
            blocks = block_ids[0] if is_plain else None
            self._leases.grant(request, blocks, turn_id=turn_id)
        return False, None

    def _finish_prefill(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay_free, params = self._hand_over(request, block_ids)
        name = announce_as_of(request.kv_transfer_params)
        if name is not None:
            self._announcements.tell(name, params if delay_free else None)
        return delay_free, params

    def _hand_over(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        if is_warm_up(request.kv_transfer_params):
            delay_free, params = False, self._keep_nothing(request)
        else:
            delay_free, params = super().request_finished(request, block_ids)
        self._num_local.pop(request.request_id, None)
        is_offered = self._returns.knows(request.request_id)
        outcome = self._returns.finish(request.request_id)
        if outcome is not None and is_offered:
            self._stats.returned(
                why=outcome.why or "", num_tokens=outcome.returned_tokens
            )
        if params is None:
            return bool(delay_free), None
        if delay_free:
            self._handovers.hold(request.request_id)
        # Where stock code cut the prompt for decode's sake, the two differ.
        is_whole = not request.kv_transfer_params.get("_p_side_truncated")
        mark = prompt_mark(request) if is_whole else None
        return bool(delay_free), handover(
            params, outcome=outcome, prompt_mark=mark, confirm_at=self._confirm_at
        )

    def _keep_nothing(self, request: Any) -> dict[str, Any]:
        """End a warm-up as stock code ends an aborted request: its blocks are
        cached, and wait for no decode engine."""
        self._stop_heartbeat(request.request_id)
        self._reqs_not_processed.add(request.request_id)
        self._reqs_need_save.pop(request.request_id, None)
        return {}

    @property
    def _confirm_at(self) -> str:
        port = service_port(self._settings, self.side_channel_port)
        return tcp_address(self.side_channel_host, port)

    # ── each step ────────────────────────────────────────────────────────────

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers are to do in this step."""
        if self._leases is not None:
            self._leases.step()
        for ended in self._awaits.step(now=time.monotonic()):
            self._take_in(ended)
        meta = super().build_connector_meta(scheduler_output)
        # Rides along to the worker, which asks when the reads are over.
        meta.kvloom_reads, self._reads = self._reads, {}
        if not scheduler_output.total_num_scheduled_tokens:
            self._mail.wait_for_news(IDLE_NAP_S)
        return meta

    def take_stats(self) -> LeaseStats:
        """What happened since the last step, for vLLM's metrics."""
        if self._leases is not None:
            self._leases.count(self._stats)
        stats, self._stats = self._stats, LeaseStats()
        return stats

    def shutdown(self) -> None:
        """Stop the threads; stock shutdown after."""
        if self._leases is not None:
            self._leases.close()
        if self._service is not None:
            self._service.close()
        self._mail.close()
        super().shutdown()
