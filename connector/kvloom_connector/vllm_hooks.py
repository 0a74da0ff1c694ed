"""What we know of vLLM's insides, in one place.

Supported: vLLM 0.32. Everything here that is not part of vLLM's connector API
is held against the installed vLLM by a test (``tests/unit/test_connector_hooks.py``).
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from vllm import __version__ as vllm_version
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request, RequestStatus

from kvloom.protocol import DIGEST_BYTES

__all__ = [
    "SUPPORTED",
    "BlockHold",
    "NixlPullConnectorScheduler",
    "bound_cores",
    "check_version",
    "ended_at_token",
    "extra_digests",
    "finish_reason",
    "is_on_cpu",
    "may_have_stopped",
    "num_valid_tokens",
    "prompt_mark",
    "spare_lookups",
]

SUPPORTED: Final = (0, 32)
"""vLLM's major and minor version that this connector was made and tested for."""

MARK_CHUNK: Final = 256

# Where a request's KV is sound after it finished: it stopped by itself.
_SOUND: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class UnsupportedVersionError(RuntimeError):
    """The installed vLLM is not one that this connector knows."""


def check_version(version: str = vllm_version) -> None:
    """Refuse to start inside a vLLM whose insides may differ.

    Raises:
        UnsupportedVersionError: with what to install instead.
    """
    parts = version.split(".")
    if tuple(parts[:2]) != tuple(str(part) for part in SUPPORTED):
        want = ".".join(str(part) for part in SUPPORTED)
        raise UnsupportedVersionError(
            f"kvloom's connector supports vLLM {want}.x, and this is vLLM {version}: "
            f"install vllm=={want}.* or use the stock NixlConnector"
        )


def is_on_cpu() -> bool:
    """Whether the model runs on the CPU."""
    return str(current_platform.device_type) == "cpu"


def bound_cores() -> set[int]:
    """The cores in ``VLLM_CPU_OMP_THREADS_BIND``; empty when it lists none.

    vLLM binds the model's threads only in worker processes of its own.
    """
    cores: set[int] = set()
    for part in envs.VLLM_CPU_OMP_THREADS_BIND.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return set()
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def num_valid_tokens(request: Request) -> int:
    """Leading tokens of a finished request whose KV exists and is final.

    The last sampled token was never run; steps still in flight (async scheduling,
    pipelines) and rejected drafts (speculative decoding) are counted in
    ``num_computed_tokens`` but hold nothing that may be read. Placeholders stand
    for output of such steps only; an abort may come while a chunk of the prompt is
    computed again.
    """
    pending = max(request.num_output_placeholders, request.num_in_flight_tokens)
    computed: int = request.num_computed_tokens - pending
    written: int = request.num_tokens - 1
    return max(0, min(computed, written))


def finish_reason(request: Request) -> str | None:
    """Why a finished request's KV is not sound, or ``None`` when it is."""
    if request.status in _SOUND:
        return None
    return str(RequestStatus(request.status).name).lower()


def ended_at_token(request: Request) -> bool:
    """Whether a token ended the answer, which is the last of its output."""
    return bool(request.status == RequestStatus.FINISHED_STOPPED)


def may_have_stopped(request: Request) -> bool:
    """Whether an aborted request may have ended at a stop string.

    vLLM finds stop strings in its front end and then aborts the request, just
    as when a client left. KV exists from the first generated token on; before,
    a read from prefill may be under way.
    """
    sampling = request.sampling_params
    return (
        request.status == RequestStatus.FINISHED_ABORTED
        and sampling is not None
        and bool(sampling.stop)
        and request.num_output_tokens > 0
    )


def extra_digests(
    request: Request, *, num_tokens: int, block_size: int
) -> tuple[bytes, ...]:
    """What else shapes each block's KV: LoRA, salt, multimodal content, embeds.

    Returns:
        One entry a block, the partial last block included; empty where nothing
        but token ids shapes any block.
    """
    if not (
        request.lora_request
        or request.cache_salt
        or request.mm_features
        or request.prompt_embeds is not None
    ):
        return ()
    digests: list[bytes] = []
    mm_index = 0
    for start in range(0, num_tokens, block_size):
        keys, mm_index = generate_block_hash_extra_keys(
            request, start, start + block_size, mm_index
        )
        digests.append(b"" if keys is None else _digest(keys))
    return tuple(digests)


def prompt_mark(request: Request) -> str | None:
    """A digest of a prompt and all that shapes its KV; the same on any engine.

    ``None`` for prompts that are not token ids.
    """
    tokens = request.prompt_token_ids
    if not tokens or request.prompt_embeds is not None:
        return None
    mark = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvloom-prompt")
    mark.update(array("i", tokens).tobytes())
    # In chunks of our own: the engines' block sizes may differ.
    extras = extra_digests(request, num_tokens=len(tokens), block_size=MARK_CHUNK)
    mark.update(b"".join(extra.ljust(DIGEST_BYTES, b"\0") for extra in extras))
    return mark.hexdigest()


def _digest(keys: tuple[Any, ...]) -> bytes:
    return hashlib.blake2b(repr(keys).encode(), digest_size=DIGEST_BYTES).digest()


def spare_lookups(manager: Any, is_waiting: Callable[[Any], bool]) -> None:
    """No look into the prefix cache for a request that waits for its prompt.

    vLLM looks in each step before it asks the connector, which takes
    milliseconds for a long history, and drops what it found when it is told to
    ask again.

    Args:
        manager: vLLM's ``KVCacheManager``.
        is_waiting: asked with the request.
    """
    look_up = manager.get_computed_blocks_for_connector

    def look_up_unless_waiting(request: Any) -> Any:
        if is_waiting(request):
            return manager.empty_kv_cache_blocks, 0, 0, False
        return look_up(request)

    manager.get_computed_blocks_for_connector = look_up_unless_waiting


class BlockHold:
    """Holds finished turns' blocks by reference count, and gives them back.

    Args:
        manager: vLLM's ``KVCacheManager``.
        give_up: called in the scheduler's thread where an allocation found no
            free blocks; whether it freed some.
        give_up_all: called there before the prefix cache is reset, which vLLM
            refuses while blocks are held, and after which their KV may be that of
            other weights.
    """

    def __init__(
        self,
        manager: Any,
        give_up: Callable[[], bool],
        give_up_all: Callable[[], None],
    ) -> None:
        self._pool = manager.block_pool
        self._allocate = manager.allocate_slots
        self._reset = manager.reset_prefix_cache
        self._give_up = give_up
        self._give_up_all = give_up_all
        # vLLM has no hook between "no free blocks" and "wait" or "preempt", nor
        # one before a reset.
        manager.allocate_slots = self._allocate_or_give_up
        manager.reset_prefix_cache = self._give_up_and_reset

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self._pool.num_gpu_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody refers to."""
        return int(self._pool.get_num_free_blocks())

    def keep(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Drop that reference; the blocks stay in the prefix cache, evictable."""
        # Tail first, so that a prefix outlives what follows it.
        self._pool.free_blocks(self._pool.blocks[block] for block in block_ids[::-1])

    def _allocate_or_give_up(self, *args: Any, **kwargs: Any) -> Any:
        while (blocks := self._allocate(*args, **kwargs)) is None:
            if not self._give_up():
                return None
        return blocks

    def _give_up_and_reset(self) -> Any:
        self._give_up_all()
        return self._reset()
