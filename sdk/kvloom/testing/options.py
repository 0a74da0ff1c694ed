"""What can be set on a fake engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from .answers import Responder, respond


class EngineOptions(TypedDict, total=False):
    """The keywords of :class:`Options`, for those who pass them on."""

    model: str
    loras: tuple[str, ...]
    block_size: int
    num_blocks: int
    max_model_len: int
    responder: Responder
    lease_ttl_s: float
    max_leased_fraction: float
    kv_recompute_threshold: int
    claim_wait_s: float
    pin_ttl_s: float
    keeps_reasoning: bool
    scale_out: bool
    pretty_arguments: bool
    fails_truncated_calls: bool
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A fake engine's settings.

    Raises:
        ValueError: one full context would not fit the engine's blocks.
    """

    model: str = "fake-model"
    loras: tuple[str, ...] = ()
    """Names of adapters that are served beside the model."""
    block_size: int = 16
    """Tokens a block."""
    num_blocks: int = 2048
    max_model_len: int = 8192
    """Tokens of prompt and answer together."""
    responder: Responder = respond
    lease_ttl_s: float = 480.0
    max_leased_fraction: float = 0.5
    """Of the decode engine's blocks, that leases may hold."""
    kv_recompute_threshold: int = 64
    """Fewer tokens than this are computed rather than pulled."""
    claim_wait_s: float = 0.25
    """How long prefill waits for an answer to a claim."""
    pin_ttl_s: float = 30.0
    """How long prefill keeps blocks that decode does not fetch."""
    keeps_reasoning: bool = True
    """Whether the template keeps the reasoning of earlier answers."""
    scale_out: bool = True
    """Whether prompts are rendered for others (``--enable-scale-out``)."""
    pretty_arguments: bool = False
    """Whether the model indents what the API hands over normalised."""
    fails_truncated_calls: bool = True
    """Whether a forced tool call that is cut off is a 500 (vllm#38911). vLLM
    0.32 answers 200 without a call; versions before it do not."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""

    def __post_init__(self) -> None:
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_size} tokens cannot hold "
                f"one context of {self.max_model_len}; raise num_blocks or lower "
                "max_model_len"
            )
