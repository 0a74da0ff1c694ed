"""What a fake engine puts into the lease of a turn, or why it grants none."""

from collections.abc import Sequence

from kvloom.protocol import PromptCounts, tells_answer

from .book import Offer
from .turns import Turn


def offer_of(turn: Turn, lease_id: str, blocks: Sequence[int]) -> Offer:
    """The lease of a finished turn, on the blocks that have its tokens."""
    return Offer(
        lease_id=lease_id,
        token_ids=turn.token_ids,
        blocks=tuple(blocks),
        extra=turn.prompt.extra,
        is_provisional=_may_have_stopped(turn),
        answer=_answer(turn),
        counts=_counts(turn),
    )


def why_not_leased(turn: Turn) -> str | None:
    """The reason for which a turn gets no lease, whatever room there is."""
    if not turn.is_generated and not _may_have_stopped(turn):
        return "aborted"
    if turn.ask.n > 1:
        return "several_choices"
    return "several_prompts" if len(turn.ask.prompts) > 1 else None


def _counts(turn: Turn) -> PromptCounts | None:
    """What decode had of the prompt of a turn that it did alone."""
    if turn.ask.params.get("do_remote_prefill"):
        return None
    return PromptCounts(
        prompt_tokens=len(turn.prompt.token_ids), cached_tokens=turn.cached_tokens
    )


def _answer(turn: Turn) -> tuple[int, ...] | None:
    """What is told of the answer, where it was asked for and a token ended it."""
    output = turn.outputs[0]
    if not tells_answer(turn.ask.params) or output.stop_reason is not None:
        return None
    return tuple(output.token_ids) if output.finish_reason == "stop" else None


def _may_have_stopped(turn: Turn) -> bool:
    """Whether it ended at a stop string, or was left and may have, for all that the
    engine's own process knows: vLLM looks for those in its front end."""
    if turn.is_generated:
        return turn.outputs[0].stop_reason is not None
    return bool(turn.ask.limits(0).stop) and turn.num_generated > 0
