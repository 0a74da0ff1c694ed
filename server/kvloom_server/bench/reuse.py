"""``kvloom bench reuse``: tool-calling conversations on real pairs of engines.

One prefill and one decode engine with kvloom's connector; a router of its own for each
way of returning in front of the same two, and each of them asked directly as one
ordinary vLLM. A second pair, on the same cores and with the same flags, has vLLM's
own connector, for *stock* and *rival* (see ``rivals.py``); a pair that idles takes a
hundredth of a core. Each conversation is played by all of them, one after another,
nothing else going on, in an order that turns with each conversation; those of the stock
pair come last, and before the next one what they leave there is waited for.

*lost* means that prefill loses its prefix cache as soon as decode has begun each
answer, as one that serves others has by the time the tool is done.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from rich.console import Console

from kvloom_server.cluster.engine_args import Role
from kvloom_server.cluster.machine import detect_device
from kvloom_server.cluster.ports import free_ports
from kvloom_server.cluster.up import RunningCluster, UpSettings, local_cluster
from kvloom_server.router import RouterServer
from kvloom_server.settings import EngineSpec, RouterSettings

from .contenders import LOOPBACK
from .dialogues import dialogue
from .meter import usable_cores
from .player import Player
from .processes import Processes, processes, without_settings
from .results import Results
from .reuse_aims import aim_rows
from .reuse_rows import STOCK_ENGINES, PrefillCache, Variant, summary_rows
from .rivals import (
    BLOCKS_TTL_S,
    SHORT_TTL_S,
    rival_command,
    stock_proxy_command,
    stock_settings,
)
from .talks import Talk
from .traces import Replay
from .ways import TIMEOUT, Contestant, EngineWay, NamedWay, RouterWay, StockWay

Step = Callable[[str], None]

TOOL_S: Final = 1.5
"""How long every tool runs: between two turns."""
QUICK_TOOL_S: Final = 0.5
ROUTERS: Final[dict[Variant, dict[str, Any]]] = {
    Variant.OFF: {"returns": "off", "direct_tokens": 0},
    Variant.LAZY: {"returns": "lazy", "direct_tokens": 0},
    Variant.EAGER: {"returns": "eager", "direct_tokens": 0},
    Variant.DIRECT: {"returns": "lazy"},
    Variant.AUTO: {"returns": "auto"},
}
VARIANTS: Final = tuple(v for v in Variant if v is not Variant.SINGLE)
"""Besides *single*, which is always there."""
CACHES: Final[tuple[PrefillCache, ...]] = ("kept", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    lengths: tuple[int, ...]
    """Tokens that the first prompts have, about."""
    num_turns: int
    repeats: int
    """Conversations of each length."""
    variants: tuple[Variant, ...] = VARIANTS
    """Besides *single*."""
    tool_s: float = TOOL_S
    """How long every tool runs."""
    recorded: tuple[Replay, ...] = ()
    """Played instead of what is made up, if there are any."""

    @property
    def num_talks(self) -> int:
        """How many conversations are played."""
        return self.repeats * (len(self.recorded) or len(self.lengths))

    @property
    def needs_stock(self) -> bool:
        """Whether the pair with vLLM's own connector is asked."""
        return not STOCK_ENGINES.isdisjoint(self.variants)

    @property
    def stock_ttl_s(self) -> int:
        """How long stock engines keep the blocks of a turn that nobody reads."""
        return BLOCKS_TTL_S if self.recorded else SHORT_TTL_S

    @property
    def num_steps(self) -> int:
        """How many steps :func:`measure` will tell of."""
        return 1 + self.needs_stock + self.num_played_steps

    @property
    def num_played_steps(self) -> int:
        """How many of them are :func:`measure_on`'s."""
        played = (1 + len(self.variants)) * len(CACHES)
        return len(self.rehearsed) + self.num_talks * played

    @property
    def rehearsed(self) -> tuple[Variant, ...]:
        """One of those that share a pair of engines: it is they that warm up."""
        stock = [v for v in self.variants if v in STOCK_ENGINES]
        ours = [v for v in self.variants if v not in STOCK_ENGINES]
        return (Variant.SINGLE, *ours[:1], *stock[:1])


def effort(
    *,
    is_quick: bool,
    repeats: int | None,
    variants: Sequence[Variant] = (),
    recorded: Sequence[Replay] = (),
) -> Effort:
    """What ``--quick``, ``--repeats``, ``--variant`` and ``--trace`` stand for."""
    chosen = tuple(v for v in VARIANTS if not variants or v in variants)
    if recorded:
        return Effort(
            lengths=(),
            num_turns=0,
            repeats=repeats or 1,
            variants=chosen,
            recorded=tuple(recorded),
        )
    if is_quick:
        return Effort(
            lengths=(300,),
            num_turns=2,
            repeats=repeats or 1,
            variants=chosen,
            tool_s=QUICK_TOOL_S,
        )
    return Effort(
        lengths=(1000, 2000, 4000), num_turns=4, repeats=repeats or 3, variants=chosen
    )


def talks(effort: Effort, *, seed: int) -> Iterator[Talk]:
    """The conversations, in the order in which they are played."""
    for repeat in range(effort.repeats):
        if effort.recorded:
            yield from effort.recorded
            continue
        for length in effort.lengths:
            yield dialogue(
                seed=seed,
                repeat=repeat,
                prefix_tokens=length,
                num_turns=effort.num_turns,
                tool_s=effort.tool_s,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """Two engines that variants share."""

    prefill: EngineSpec
    """It has vLLM's development endpoints."""
    decode: EngineSpec
    model: str
    """The name to ask for."""


async def measure(
    results: Results, effort: Effort, *, seed: int, console: Console, step: Step
) -> None:
    """Start the engines and play every conversation.

    Raises:
        BenchUnavailableError: vllm-router is not installed.
        ClusterError: an engine did not start.
        ModelUnavailableError: the bundled model can't be prepared.
        ProcessFailedError: a proxy did not start.
    """
    if Variant.RIVAL in effort.variants:
        rival_command("", "", (0, 0))  # said before minutes are spent on engines
    async with AsyncExitStack() as stack:
        stack.enter_context(without_settings())
        step("kvloom's engines start")
        # Only the routers below are asked.
        ours = UpSettings(port=0, has_dev_endpoints=True)
        cluster = local_cluster(ours, console=console)
        pair = pair_of(await stack.enter_async_context(cluster))
        stock = None
        if effort.needs_stock:
            step("stock engines start")
            settings = stock_settings(detect_device(), ttl_s=effort.stock_ttl_s)
            theirs = local_cluster(settings, console=console)
            stock = pair_of(await stack.enter_async_context(theirs))
        await measure_on(pair, results, effort, stock=stock, seed=seed, step=step)


def pair_of(running: RunningCluster) -> EnginePair:
    """The first of a cluster's engines."""

    def spec(role: Role) -> EngineSpec:
        addresses = running.lease_addresses(role)
        return EngineSpec(
            url=running.urls(role)[0], lease_address=next(iter(addresses), None)
        )

    return EnginePair(
        prefill=spec(Role.PREFILL), decode=spec(Role.DECODE), model=running.model
    )


async def measure_on(
    pair: EnginePair,
    results: Results,
    effort: Effort,
    *,
    stock: EnginePair | None = None,
    seed: int,
    step: Step,
) -> None:
    """Play every conversation on engines that run.

    Args:
        pair: with kvloom's connector.
        stock: with vLLM's own, where a variant needs it.
    """
    results.add({"row": "reuse_effort", "tool_s": effort.tool_s})
    async with AsyncExitStack() as stack:
        stack.enter_context(without_settings())
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=TIMEOUT))
        started = await stack.enter_async_context(processes())
        others = await contestants_of(
            http,
            pair,
            stock,
            effort.variants,
            stack,
            started,
            ttl_s=effort.stock_ttl_s,
        )
        player = Player(
            http,
            model=pair.model,
            singles=[
                Contestant(way=EngineWay(http, engine.url), prefill=engine.url)
                for engine in (pair.prefill, pair.decode)
            ],
            others=others,
        )
        await player.rehearse(
            seed, effort.rehearsed, lambda variant: step(f"rehearsal: {variant}")
        )
        await _play_all(player, effort, seed=seed, results=results, step=step)
    for row in summary_rows(results.rows) + aim_rows(results.rows):
        results.add(row)


async def contestants_of(
    http: aiohttp.ClientSession,
    pair: EnginePair,
    stock: EnginePair | None,
    variants: Sequence[Variant],
    stack: AsyncExitStack,
    started: Processes,
    *,
    ttl_s: int = BLOCKS_TTL_S,
) -> dict[Variant, Contestant]:
    """Whoever serves the variants.

    Args:
        http: a client.
        pair: engines with kvloom's connector.
        stock: with vLLM's own; ``None`` where no variant needs it.
        variants: but for *single*.
        stack: routers stop at its end.
        started: proxies stop at its end.
        ttl_s: how long stock engines keep the blocks of a turn.
    """
    made: dict[Variant, Contestant] = {}
    for variant in variants:
        if variant in ROUTERS:
            url = await stack.enter_async_context(_router(pair, variant))
            made[variant] = Contestant(
                way=RouterWay(http, url),
                prefill=pair.prefill.url,
                decode=pair.decode.url,
            )
        else:
            assert stock is not None, "the caller has started the stock pair"
            made[variant] = await _stock_contestant(
                http, variant, stock, started, ttl_s=ttl_s
            )
    return made


async def _stock_contestant(
    http: aiohttp.ClientSession,
    variant: Variant,
    stock: EnginePair,
    started: Processes,
    *,
    ttl_s: int,
) -> Contestant:
    prefill, decode = stock.prefill.url, stock.decode.url
    port, metrics_port = free_ports(2)
    url = f"http://{LOOPBACK}:{port}"
    if variant is Variant.STOCK:
        command = stock_proxy_command(prefill, decode, port, ttl_s=ttl_s)
        way: StockWay | NamedWay = StockWay(http, url)
    else:
        command = rival_command(prefill, decode, (port, metrics_port))
        way = NamedWay(http, url)
    await started.start(variant.value, command, port=port, cores=usable_cores())
    return Contestant(way=way, prefill=prefill, decode=decode)


async def _play_all(
    player: Player, effort: Effort, *, seed: int, results: Results, step: Step
) -> None:
    turned = 0
    for talk in talks(effort, seed=seed):
        for cache in CACHES:
            if effort.needs_stock:
                # Nobody pays for what stock engines still keep for the one before.
                await asyncio.sleep(effort.stock_ttl_s + 0.5)
            # It has lost nothing in either case.
            step(f"{talk.name}: single")
            await player.play(talk, Variant.SINGLE, "kept", results)
            for variant in _in_order(effort.variants, turned):
                step(f"{talk.name}: {variant}, cache {cache}")
                await player.play(talk, variant, cache, results)
            turned += 1


def _in_order(variants: Sequence[Variant], by: int) -> list[Variant]:
    """Those of one pair of engines after those of the other, the stock pair last.
    Another one begins each time, so that no place in the order is anybody's."""
    ours = [v for v in variants if v not in STOCK_ENGINES]
    stock = [v for v in variants if v in STOCK_ENGINES]
    return _turned(ours, by) + _turned(stock, by)


def _turned(variants: Sequence[Variant], by: int) -> list[Variant]:
    first = by % max(len(variants), 1)
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
