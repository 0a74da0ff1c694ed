"""``kvloom bench reuse``: tool-calling conversations on a real pair of engines.

One prefill and one decode engine; a router of its own for each way of returning in
front of the same two, and the prefill engine asked directly as one ordinary vLLM.
Each conversation is played by all of them, one after another, nothing else going
on, in an order that turns with each conversation.

*lost* means that prefill loses its prefix cache as soon as decode has begun each
answer, as one that serves others has by the time the tool is done.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from rich.console import Console

from kvloom_server.cluster.engine_args import Role
from kvloom_server.cluster.up import UpSettings, local_cluster
from kvloom_server.router import RouterServer
from kvloom_server.settings import EngineSpec, RouterSettings

from .dialogues import Dialogue, Message, dialogue
from .results import Results
from .reuse_rows import Place, PrefillCache, Variant, error_row, summary_rows, turn_row
from .ways import (
    TIMEOUT,
    Ask,
    Asked,
    EngineWay,
    RouterWay,
    TurnFailedError,
    Way,
    forget,
)

Step = Callable[[str], None]

TOOL_S: Final = 1.5
"""How long every tool runs: between two turns."""
ROUTERS: Final[dict[Variant, dict[str, Any]]] = {
    Variant.OFF: {"returns": "off", "direct_tokens": 0},
    Variant.LAZY: {"returns": "lazy", "direct_tokens": 0},
    Variant.EAGER: {"returns": "eager", "direct_tokens": 0},
    Variant.DIRECT: {"returns": "lazy"},
    Variant.AUTO: {"returns": "auto"},
}
CACHES: Final[tuple[PrefillCache, ...]] = ("kept", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    lengths: tuple[int, ...]
    """Tokens that the first prompts have, about."""
    num_turns: int
    repeats: int
    """Conversations of each length."""
    variants: tuple[Variant, ...] = tuple(ROUTERS)
    """Besides *single*."""

    @property
    def num_steps(self) -> int:
        """How many steps :func:`measure` will tell of."""
        played = 1 + len(self.variants) * len(CACHES)
        return 1 + self.repeats * len(self.lengths) * played


def effort(
    *, is_quick: bool, repeats: int | None, variants: Sequence[Variant] = ()
) -> Effort:
    """What ``--quick``, ``--repeats`` and ``--variant`` stand for."""
    chosen = tuple(v for v in ROUTERS if not variants or v in variants)
    if is_quick:
        return Effort(
            lengths=(800,), num_turns=3, repeats=repeats or 1, variants=chosen
        )
    return Effort(
        lengths=(1000, 2000, 4000), num_turns=4, repeats=repeats or 3, variants=chosen
    )


async def measure(
    results: Results, effort: Effort, *, seed: int, console: Console, step: Step
) -> None:
    """Start the engines and play every conversation.

    Raises:
        ClusterError: an engine did not start.
        ModelUnavailableError: the bundled model can't be prepared.
    """
    step("engines start")
    # Only the routers below are asked.
    settings = UpSettings(port=0, has_dev_endpoints=True)
    async with local_cluster(settings, console=console) as running:
        prefill, decode = (
            EngineSpec(
                url=running.urls(role)[0],
                lease_address=running.lease_addresses(role)[0],
            )
            for role in (Role.PREFILL, Role.DECODE)
        )
        pair = EnginePair(prefill=prefill, decode=decode, model=running.model)
        await measure_on(pair, results, effort, seed=seed, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """The engines that all variants share."""

    prefill: EngineSpec
    """It has vLLM's development endpoints."""
    decode: EngineSpec
    model: str
    """The name to ask for."""


async def measure_on(
    pair: EnginePair,
    results: Results,
    effort: Effort,
    *,
    seed: int,
    step: Step,
    tool_s: float = TOOL_S,
) -> None:
    """Play every conversation on engines that run.

    ``tool_s`` is how long every tool runs.
    """
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as http,
        AsyncExitStack() as stack,
    ):
        ways: dict[Variant, Way] = {
            variant: RouterWay(
                http, await stack.enter_async_context(_router(pair, variant))
            )
            for variant in effort.variants
        }
        player = Player(http, pair=pair, ways=ways, tool_s=tool_s)
        await player.rehearse(seed)
        await _play_all(player, effort, seed=seed, results=results, step=step)
    for row in summary_rows(results.rows):
        results.add(row)


async def _play_all(
    player: "Player", effort: Effort, *, seed: int, results: Results, step: Step
) -> None:
    turned = 0
    for repeat in range(effort.repeats):
        for length in effort.lengths:
            talk = dialogue(
                seed=seed,
                repeat=repeat,
                prefix_tokens=length,
                num_turns=effort.num_turns,
            )
            step(f"{talk.name}: single")
            await player.floor(talk, results)
            for cache in CACHES:
                for variant in _turned(effort.variants, turned):
                    step(f"{talk.name}: {variant}, cache {cache}")
                    await player.play(talk, variant, cache, results)
                turned += 1


def _turned(variants: Sequence[Variant], by: int) -> list[Variant]:
    """Another one begins each time, so that no place in the order is anybody's."""
    first = by % len(variants)
    return [*variants[first:], *variants[:first]]


@asynccontextmanager
async def _router(pair: EnginePair, variant: Variant) -> AsyncIterator[str]:
    """A router in front of the engines; its URL."""
    router = RouterServer(
        RouterSettings(
            port=0,
            prefill=(pair.prefill,),
            decode=(pair.decode,),
            cluster_key_file=None,
            **ROUTERS[variant],
        )
    )
    await router.start()
    try:
        yield router.url
    finally:
        await router.stop()


class Player:
    """Plays conversations with whoever serves them, one turn at a time.

    Args:
        http: a client.
        pair: the engines.
        ways: who serves each variant, but for *single*.
        tool_s: the pause between two turns.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        pair: EnginePair,
        ways: dict[Variant, Way],
        tool_s: float,
    ) -> None:
        self._http = http
        self._prefill = pair.prefill.url
        self._model = pair.model
        self._tool_s = tool_s
        self._single = EngineWay(http, self._prefill)
        self._ways = ways
        self._truths: dict[tuple[int, ...], list[int]] = {}
        """Right answers by prompt: what one vLLM said, of this conversation."""

    async def rehearse(self, seed: int) -> None:
        """A short conversation that is not counted: first requests are slow."""
        talk = dialogue(seed=seed, repeat=-1, prefix_tokens=100, num_turns=2)
        unseen = Results(None, {})
        await self.floor(talk, unseen)
        for variant in self._ways:
            await self.play(talk, variant, "kept", unseen)

    async def floor(self, talk: Dialogue, results: Results) -> None:
        """Play it with one vLLM: the floor, and what is right."""
        self._truths.clear()
        await self._conversation(talk, Variant.SINGLE, "kept", results)

    async def play(
        self, talk: Dialogue, variant: Variant, cache: PrefillCache, results: Results
    ) -> None:
        """Play it with a variant; a turn that fails ends it, and is a row too."""
        await self._conversation(talk, variant, cache, results)

    async def _conversation(
        self, talk: Dialogue, variant: Variant, cache: PrefillCache, results: Results
    ) -> None:
        # Nobody finds what another variant has left in a cache.
        salt = uuid.uuid4().hex
        messages: list[Message] = list(talk.opening)
        history: list[int] = []
        for turn in range(talk.num_turns):
            place = Place(
                variant=variant,
                prefill_cache=cache,
                conversation=talk.name,
                prefix_tokens=talk.prefix_tokens,
                turn=turn + 1,
            )
            body = self._body(talk, messages, turn, salt)
            ask = Ask(
                body=body,
                conversation=f"bench-{salt}",
                is_final=turn == talk.num_turns - 1,
            )
            try:
                asked = await self._asked(ask, variant, is_losing=cache == "lost")
                truth = await self._truth(asked, body, variant)
            except TurnFailedError as error:
                results.add(error_row(place, str(error)))
                return
            heard = asked.heard
            results.add(
                turn_row(place, heard, plan=asked.plan, history=history, truth=truth)
            )
            if ask.is_final:
                return
            messages = talk.next_messages(messages, heard.message, turn + 1)
            history = heard.prompt_ids + heard.token_ids
            await asyncio.sleep(self._tool_s)

    def _body(
        self, talk: Dialogue, messages: Sequence[Message], turn: int, salt: str
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": list(messages),
            "cache_salt": salt,
            **talk.prompt(turn),
        }

    async def _asked(self, ask: Ask, variant: Variant, *, is_losing: bool) -> Asked:
        """One turn; prefill loses its cache while the answer goes on."""
        way = self._single if variant is Variant.SINGLE else self._ways[variant]
        if not is_losing:
            return await way.ask(ask)
        losing: list[asyncio.Task[None]] = []

        def lose() -> None:
            losing.append(asyncio.create_task(forget(self._http, self._prefill)))

        try:
            asked = await way.ask(
                Ask(
                    body=ask.body,
                    conversation=ask.conversation,
                    is_final=ask.is_final,
                    on_first=lose,
                )
            )
            await asyncio.gather(*losing)
        finally:
            for task in losing:
                task.cancel()
        return asked

    async def _truth(
        self, asked: Asked, body: dict[str, Any], variant: Variant
    ) -> list[int]:
        """What one vLLM answers to this prompt: as it did, or asked afresh where a
        history has gone another way."""
        prompt = tuple(asked.heard.prompt_ids)
        if variant is Variant.SINGLE:
            self._truths[prompt] = asked.heard.token_ids
        if prompt not in self._truths:
            fresh = body | {"cache_salt": uuid.uuid4().hex}
            ask = Ask(body=fresh, conversation="", is_final=True)
            self._truths[prompt] = (await self._single.ask(ask)).heard.token_ids
        return self._truths[prompt]
