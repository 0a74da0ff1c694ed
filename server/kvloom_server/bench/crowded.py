"""``kvloom bench pressure --engines``: more conversations than decode has room for.

Two pairs of engines with a decode engine far too small: kvloom's behind a router with
*lazy* returns, and vLLM's own connector behind *stock*'s proxy (``rivals.py``). All
conversations of a crowd are under way at once; both pairs take their turns.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
from rich.console import Console

from kvloom_server.cluster.machine import detect_device
from kvloom_server.cluster.up import UpSettings, local_cluster

from .counters import Counters, read_counters
from .dialogues import dialogue
from .processes import processes, without_settings
from .results import Results, Row
from .reuse import EnginePair, contestants_of, pair_of
from .reuse_rows import Variant
from .rivals import stock_settings
from .statistics import percentile
from .talks import Talk, body_of
from .ways import TIMEOUT, Ask, Contestant, TurnFailedError

CROWDS: Final = (4, 8, 16)
"""Conversations at once."""
SMALL_DECODE: Final = ("--num-gpu-blocks-override=110", "--max-model-len=3200")
"""Room for five conversations of these."""
PREFIX_TOKENS: Final = 300
NUM_TURNS: Final = 3
TOOL_S: Final = 1.0
LONG_WAIT_S: Final = 5.0
VARIANTS: Final = (Variant.LAZY, Variant.STOCK)

Step = Callable[[str], None]


def num_steps(crowds: Sequence[int]) -> int:
    """How many steps :func:`measure` will tell of."""
    return 2 + len(VARIANTS) * len(crowds)


async def measure(
    results: Results, *, crowds: Sequence[int], seed: int, console: Console, step: Step
) -> None:
    """Start both pairs and let every crowd at each.

    Raises:
        ClusterError: an engine did not start.
        ModelUnavailableError: the bundled model can't be prepared.
        ProcessFailedError: the stock proxy did not start.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(without_settings())
        pairs: list[EnginePair] = []
        ours = UpSettings(port=0)
        for name, settings in (
            ("kvloom's", ours),
            ("stock", stock_settings(detect_device())),
        ):
            step(f"{name} engines start")
            small = replace(
                settings, decode_args=(*settings.decode_args, *SMALL_DECODE)
            )
            cluster = local_cluster(small, console=console)
            pairs.append(pair_of(await stack.enter_async_context(cluster)))
        await measure_on(
            pairs[0], pairs[1], results, crowds=crowds, seed=seed, step=step
        )


async def measure_on(
    pair: EnginePair,
    stock: EnginePair,
    results: Results,
    *,
    crowds: Sequence[int],
    seed: int,
    step: Step,
) -> None:
    """Let every crowd at engines that run."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=TIMEOUT))
        started = await stack.enter_async_context(processes())
        contestants = await contestants_of(http, pair, stock, VARIANTS, stack, started)
        for size in crowds:
            for variant, contestant in contestants.items():
                step(f"{size} conversations: {variant}")
                crowd = _Crowd(http, contestant, model=pair.model)
                results.add(await crowd.row(variant, size, seed))


@dataclass(slots=True, kw_only=True)
class _Turn:
    """One that was answered, or was not."""

    number: int
    ttft_s: float | None = None


class _Crowd:
    """Conversations that are under way at once, at one contestant."""

    def __init__(
        self, http: aiohttp.ClientSession, contestant: Contestant, *, model: str
    ) -> None:
        self._http = http
        self._contestant = contestant
        self._model = model

    async def row(self, variant: Variant, size: int, seed: int) -> Row:
        """Let ``size`` conversations begin together; what became of them."""
        talks = [
            dialogue(
                seed=seed,
                repeat=number,
                prefix_tokens=PREFIX_TOKENS,
                num_turns=NUM_TURNS,
                tool_s=TOOL_S,
            )
            for number in range(size)
        ]
        before = await self._counted()
        played = await asyncio.gather(*(self._played(talk) for talk in talks))
        after = await self._counted()
        turns = [turn for each in played for turn in each]
        prefill, decode = (a.since(b) for a, b in zip(after, before, strict=True))
        return {
            "row": "pressure_engines",
            "variant": variant.value,
            "conversations": size,
            "turns": len(turns),
            "served": sum(turn.ttft_s is not None for turn in turns),
            **_times(turns),
            "preemptions": round(decode.preemptions + prefill.preemptions),
            "evictions": round(decode.evictions),
            "returned_tokens": round(prefill.returned_tokens),
        }

    async def _counted(self) -> tuple[Counters, Counters]:
        decode = self._contestant.decode
        assert decode is not None, "every contestant here has two engines"
        return (
            await read_counters(self._http, self._contestant.prefill),
            await read_counters(self._http, decode),
        )

    async def _played(self, talk: Talk) -> list[_Turn]:
        """Turns that follow one that failed are not asked, and count as failed."""
        name = f"crowd-{uuid.uuid4().hex}"
        messages = list(talk.opening)
        turns = [_Turn(number=number) for number in range(talk.num_turns)]
        for turn in turns:
            await asyncio.sleep(talk.pause_s(turn.number))
            is_final = turn.number == talk.num_turns - 1
            body = body_of(talk, turn.number, messages, model=self._model, salt=name)
            ask = Ask(body=body, conversation=name, is_final=is_final)
            try:
                heard = (await self._contestant.way.ask(ask)).heard
            except TurnFailedError:
                break
            turn.ttft_s = heard.ttft_s
            if not is_final:
                messages = talk.next_messages(messages, heard.message, turn.number + 1)
        return turns


def _times(turns: Sequence[_Turn]) -> Row:
    served = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    later = [t.ttft_s for t in turns if t.ttft_s is not None and t.number > 0]
    return {
        "waits": sum(ttft_s > LONG_WAIT_S for ttft_s in served),
        "ttft_p50_ms": 1e3 * percentile(later, 0.5) if later else None,
        "ttft_p95_ms": 1e3 * percentile(later, 0.95) if later else None,
    }
