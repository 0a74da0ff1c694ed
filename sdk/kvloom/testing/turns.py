"""One prompt on its way through a fake engine, from its blocks to its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloom.protocol import PrefillOutcome

from .answers import Context, Output, limited, pieces_of
from .asks import Ask
from .cache import BlockPool, block_digests, extra_digest
from .claims import Prompt
from .options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """KV that was read from another engine, by block."""

    num_tokens: int = 0
    """End of the prompt's tokens that it covers, counted from the prompt's
    start."""
    first_block: int = 0
    content: Sequence[tuple[int, ...]] = ()
    why: str | None = None
    """A :class:`~kvloom.protocol.Reason` where nothing was read."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """A prompt that has its blocks, and the answer that its KV gives."""

    ask: Ask
    prompt: Prompt
    finish: "Callable[[Turn], None]"
    """What its engine does once the last token is there."""
    request_id: str
    """The engine's internal one."""
    index: int
    """Of the prompt in its request."""
    blocks: list[int]
    prompt_kv: list[int]
    """The prompt as it is stored in the blocks."""
    outputs: list[Output]
    cached_tokens: int
    """Of the prompt, that were not computed here."""
    outcome: PrefillOutcome
    num_generated: int = field(default=0)
    """Tokens of the longest choice so far."""
    is_finished: bool = False
    """Whether the engine is done with it: blocks released, lease granted."""
    handover: dict[str, Any] | None = None
    """``kv_transfer_params`` of the answer, once it is finished."""

    def advance(self, num_tokens: int) -> None:
        """Generate up to ``num_tokens`` of each choice."""
        self.num_generated = num_tokens
        if self.is_generated and not self.is_finished:
            self.finish(self)

    @property
    def is_generated(self) -> bool:
        return self.num_generated >= self.num_steps

    @property
    def num_steps(self) -> int:
        """Tokens of the longest choice."""
        return max(len(output.pieces) for output in self.outputs)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens whose KV exists: all but the last one sampled."""
        return (*self.prompt.token_ids, *self._computed)

    @property
    def kv(self) -> list[int]:
        """What the blocks hold for :attr:`token_ids`."""
        return [*self.prompt_kv, *self._computed]

    @property
    def _computed(self) -> list[int]:
        return self.outputs[0].token_ids[: max(self.num_generated - 1, 0)]


def read_prompt(ask: Ask, index: int, options: Options) -> Prompt:
    """Prompt number ``index`` of a request, with its digests."""
    extra = extra_digest(model=options.model, lora=ask.lora, cache_salt=ask.cache_salt)
    token_ids = ask.prompts[index]
    return Prompt(
        token_ids=token_ids,
        digests=block_digests(token_ids, block_size=options.block_size, extra=extra),
        extra=extra,
        block_size=options.block_size,
    )


def cached_blocks(pool: BlockPool, prompt: Prompt) -> list[int]:
    """Blocks of the prompt that are cached here; the last token never is,
    because an engine has to compute something to answer."""
    usable = (len(prompt.token_ids) - 1) // prompt.block_size
    return pool.cached_prefix(prompt.digests[:usable])


def kv_of(prompt: Prompt, held: Sequence[tuple[int, ...]], loaded: Loaded) -> list[int]:
    """The token ids that the prompt's KV is really made of.

    Args:
        prompt: computes what neither of the others has.
        held: content of the local blocks that are used.
        loaded: what was read from elsewhere.
    """
    kv = [token for block in held for token in block]
    start = loaded.first_block * prompt.block_size
    pulled = [token for block in loaded.content for token in block]
    kv += pulled[len(kv) - start : loaded.num_tokens - start]
    kv += prompt.token_ids[len(kv) :]
    return kv


def answers_to(
    ask: Ask, index: int, kv: Sequence[int], options: Options
) -> list[Output]:
    """Every choice of the answer that this KV gives."""
    return [_output(ask, index, tuple(kv), i, options) for i in range(ask.n)]


def _output(
    ask: Ask, index: int, kv: tuple[int, ...], choice: int, options: Options
) -> Output:
    context = Context(
        token_ids=kv,
        choice=choice,
        tools=ask.tools,
        must_call=ask.must_call,
        schema=ask.schema,
    )
    answer = options.responder(context)
    pieces = pieces_of(answer, pretty_arguments=options.pretty_arguments)
    return limited(pieces, ask.limits(index), seed=context.seed)
