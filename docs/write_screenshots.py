"""Takes the operator's page for the documents: fake engines, a real router.

    python docs/write_screenshots.py

The engines are `kvloom.testing`'s, slowed down so that a computed token takes
0.4 ms and one that is moved 0.02 ms. What the page shows of them is what the
router measured.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from e2e.browser import browser, visiting  # noqa: E402
from e2e.test_router_stage import MODEL, Stage, follow_up  # noqa: E402

from kvloom.testing import FakeCluster  # noqa: E402
from kvloom_server.router.upstream import (  # noqa: E402
    AiohttpUpstream,
    UpstreamRequest,
    UpstreamResponse,
    read_all,
)

COMPUTE_S, MOVE_S = 0.0004, 0.00002
PICTURES = {
    "page-light": (1280, "light"),
    "page-dark": (1280, "dark"),
    "page-phone": (390, "light"),
}
SYSTEM = "You are the travel desk of a small company. Be brief. "


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that has been read."""

    status: int
    headers: tuple[tuple[str, str], ...]
    data: bytes = field(repr=False)

    async def body(self) -> AsyncIterator[bytes]:
        yield self.data

    async def abort(self) -> None:
        pass


class SlowUpstream:
    """Prefill legs that take the time of what they compute."""

    def __init__(self, inner: AiohttpUpstream, prefill: set[str]) -> None:
        self._inner = inner
        self._prefill = prefill

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        response = await self._inner.send(request)
        if request.url not in self._prefill or response.status != 200:
            return response
        data = await read_all(response)
        await asyncio.sleep(_seconds(data))
        return Whole(response.status, response.headers, data)


def _seconds(answer: bytes) -> float:
    from kvloom.protocol import outcome_of
    from kvloom_server.router.job import decoded

    prefilled = decoded(answer)
    outcome = outcome_of(prefilled.kv_transfer_params or {})
    if outcome is None or prefilled.usage is None:
        return 0.0
    moved = outcome.returned_tokens
    computed = (prefilled.usage.prompt_tokens or 0) - outcome.local_tokens - moved
    return 0.02 + COMPUTE_S * computed + MOVE_S * moved


class SlowStage(Stage):
    """The stage of the tests, at the pace of engines."""

    def __init__(self, cluster: FakeCluster, settings: dict[str, Any]) -> None:
        super().__init__(cluster, settings)
        urls = {server.url + "/v1/chat/completions" for server in cluster.prefill}
        self.upstream = SlowUpstream(self._inner, urls)
        self.router = self._new_router()


async def agent(stage: Stage, name: str, turns: int, dice: random.Random) -> None:
    """One agent's loop, with pauses, and now and then an edited history."""
    headers = {"X-Session-ID": name}
    question = " ".join(dice.choices(SYSTEM.split(), k=20 + dice.randrange(40)))
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM * dice.randint(4, 12)},
        {"role": "user", "content": question},
    ]
    for number in range(turns):
        told = await stage.turn(messages, extra_headers=headers)
        text = " ".join(dice.choices(SYSTEM.split(), k=1 + dice.randrange(6)))
        messages = follow_up(messages, told.message, text)
        if dice.random() < 0.06 and number:
            messages[1] = {"role": "user", "content": question + " please"}
        if dice.random() < 0.5:
            for server in stage.cluster.prefill:
                server.engine.lose_cache()
        await asyncio.sleep(0.1 + dice.random() * 1.2)


async def main() -> None:
    dice = random.Random(7)
    async with (
        FakeCluster(
            prefill=2, decode=2, model=MODEL, num_blocks=2600, claim_wait_s=5.0
        ) as cluster,
        SlowStage(cluster, {}) as stage,
        browser() as chromium,
    ):
        agents = [
            asyncio.create_task(
                agent(stage, f"agent-{i:04d}", dice.randint(8, 40), dice)
            )
            for i in range(9)
        ]
        await asyncio.sleep(9)
        for name, (width, scheme) in PICTURES.items():
            async with visiting(
                chromium, stage.router.url, width=width, color_scheme=scheme
            ) as visit:
                await visit.page.wait_for_selector(".lane")
                await visit.page.wait_for_timeout(1500)
                await visit.page.screenshot(
                    path=DOCS / f"{name}.png", full_page=True, animations="disabled"
                )
        for one in agents:
            one.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
