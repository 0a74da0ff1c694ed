"""Starts a cluster's engines, waits until they serve, and stops them."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from .engine_args import (
    Device,
    EngineSlot,
    Recipe,
    Role,
    engine_command,
    engine_environment,
    share_cores,
)
from .flags import gpus_each, ranks_of
from .machine import usable_cores
from .ports import free_runs
from .processes import EngineProcess
from .scratch import Scratch, remove_abandoned

T = TypeVar("T")

HEALTH_POLL_S = 0.5
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class ClusterError(RuntimeError):
    """An engine could not be started; the message says why and where to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUp:
    """Progress: one engine serves."""

    name: str
    url: str
    num_up: int
    num_engines: int


def plan_slots(
    *,
    num_prefill: int,
    num_decode: int,
    device: Device,
    args_of: Callable[[Role], Sequence[str]] = lambda _: (),
) -> list[EngineSlot]:
    """Ports, cores and GPUs for each engine of a cluster on this machine.

    ``CUDA_VISIBLE_DEVICES`` says which GPUs there are; unset, all from 0 on.

    Args:
        num_prefill: how many engines of this role.
        num_decode: likewise.
        device: what they run on.
        args_of: the flags that are passed through to them.

    Raises:
        ClusterError: there are not so many GPUs.
    """
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    ranks = [ranks_of(args_of(role)) for role in roles]
    # A rank's side channel and lease service are as many ports above as its number.
    runs = [length for r in ranks for length in (1, *[r.first + r.count] * 2)]
    ports = iter(free_runs(runs))
    cores = share_cores(usable_cores(), len(roles))
    num_gpus = [gpus_each(args_of(role)) for role in roles]
    gpus: Iterator[str] = iter(())
    if device is Device.CUDA:
        gpus = iter(visible_gpus(count=sum(num_gpus)))
    slots = []
    for index, role in enumerate(roles):
        number = index if role is Role.PREFILL else index - num_prefill
        slots.append(
            EngineSlot(
                name=f"{role[0]}{number}",
                role=role,
                http_port=next(ports),
                side_port=next(ports),
                lease_port=next(ports),
                cores=cores[index] if device is Device.CPU else (),
                gpus=tuple(islice(gpus, num_gpus[index])),
                ranks=ranks[index],
            )
        )
    return slots


def visible_gpus(*, count: int) -> tuple[str, ...]:
    """Names of the GPUs to use, ``count`` at the most.

    Raises:
        ClusterError: ``CUDA_VISIBLE_DEVICES`` allows fewer.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return tuple(map(str, range(count)))
    listed = (name.strip() for name in allowed.split(",") if name.strip())
    # CUDA sees none of those that follow.
    names = tuple(takewhile(lambda name: name != "-1", listed))
    if len(names) < count:
        raise ClusterError(
            f"the engines need {count} GPUs and CUDA_VISIBLE_DEVICES allows "
            f"{len(names)}: start fewer engines, or allow more"
        )
    return names[:count]


class Cluster:
    """The engines of one local cluster, from ``start`` to ``stop``.

    Args:
        slots: where each engine runs.
        recipe: what they have in common.
        log_dir: gets one file an engine.
        start_timeout_s: how long the engines may take to serve.
        on_up: told of each engine that serves.
    """

    def __init__(
        self,
        slots: list[EngineSlot],
        recipe: Recipe,
        *,
        log_dir: Path,
        start_timeout_s: float = 900.0,
        on_up: Callable[[EngineUp], None] = lambda _: None,
    ) -> None:
        self.slots = slots
        self._recipe = recipe
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._on_up = on_up
        self.processes: list[EngineProcess] = []
        remove_abandoned()
        self._scratch = Scratch()
        self._lost: list[EngineProcess] = []
        self._num_up = 0

    async def start(self) -> None:
        """Start every engine; none is left when one fails.

        Raises:
            ClusterError: an engine ended or did not serve in time.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        # Engines leave sockets behind in the folder for temporary files.
        scratch = self._scratch.path
        own = {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
        for slot in self.slots:
            self.processes.append(
                await EngineProcess.start(
                    slot.name,
                    engine_command(slot, self._recipe),
                    engine_environment(slot, self._recipe, inherited=os.environ) | own,
                    self._log_dir / f"{slot.name}.log",
                )
            )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self.while_all_run(self._wait_until_all_up())
        except TimeoutError:
            raise ClusterError(
                f"the engines did not serve within {self._start_timeout_s:.0f} s; "
                f"their logs are in {self._log_dir}"
            ) from None

    async def while_all_run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled where an engine ends first.

        Raises:
            ClusterError: an engine ended.
        """
        main = asyncio.create_task(work)
        ends = [asyncio.create_task(_fail_at_end_of(p)) for p in self.processes]
        try:
            done, _ = await asyncio.wait(
                [main, *ends], return_when=asyncio.FIRST_COMPLETED
            )
            for end in done - {main}:
                end.result()
            return main.result()
        finally:
            for task in (main, *ends):
                task.cancel()
            await asyncio.gather(main, *ends, return_exceptions=True)

    async def _wait_until_all_up(self) -> None:
        async with asyncio.TaskGroup() as waits:
            for slot in self.slots:
                waits.create_task(self._wait_until_up(slot))

    async def _wait_until_up(self, slot: EngineSlot) -> None:
        async with aiohttp.ClientSession(timeout=_HEALTH_TIMEOUT) as session:
            # Another process's health is no event of ours.
            while not await _is_healthy(session, slot.url):  # noqa: ASYNC110
                await asyncio.sleep(HEALTH_POLL_S)
        self._num_up += 1
        self._on_up(
            EngineUp(
                name=slot.name,
                url=slot.url,
                num_up=self._num_up,
                num_engines=len(self.slots),
            )
        )

    async def wait_for_exit(self) -> EngineProcess:
        """Until one more of the engines ends by itself; each is told of once."""
        running = [p for p in self.processes if p not in self._lost]
        tasks = {asyncio.create_task(p.wait()): p for p in running}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        ended = tasks[done.pop()]
        self._lost.append(ended)
        return ended

    def num_left(self, role: Role) -> int:
        """How many engines of this role run, as far as ``wait_for_exit`` told."""
        lost = {process.name for process in self._lost}
        return sum(s.role is role and s.name not in lost for s in self.slots)

    async def stop(self) -> None:
        """End every engine; nothing of them is left."""
        await asyncio.gather(*(process.stop() for process in self.processes))
        self._scratch.remove()


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _fail_at_end_of(process: EngineProcess) -> None:
    exit_code = await process.wait()
    sentence = f"engine {process.name} ended with exit code {exit_code}."
    raise ClusterError(process.end_told(sentence))
