"""The operator's page, as a person with a browser sees it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.browser import Visit, browser, needs_chromium, visiting
from e2e.test_router_stage import CONVERSATION, Stage, follow_up, opening, staged
from playwright.async_api import Browser, Page, expect

pytestmark = [pytest.mark.anyio, needs_chromium]

WIDE, NARROW = 1280, 390


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """One for all; each visit has a profile of its own."""
    async with browser() as one:
        yield one


async def converse(stage: Stage, name: str, turns: int) -> None:
    """One conversation, whose every turn after the first is returned."""
    messages = opening(f"{name} asks: what is there to see? ")
    headers = {"X-Session-ID": name}
    for _ in range(turns):
        stage.cluster.prefill[0].engine.lose_cache()
        told = await stage.turn(messages, extra_headers=headers)
        messages = follow_up(messages, told.message)


@asynccontextmanager
async def shown(
    chromium: Browser, *, width: int = WIDE, **options: Any
) -> AsyncIterator[tuple[Stage, Visit]]:
    """Two conversations have been played, and somebody looks."""
    async with staged() as stage:
        await converse(stage, "conversation-1", 4)
        await converse(stage, "conversation-2", 3)
        origin = stage.router.url
        async with visiting(chromium, origin, width=width, **options) as visit:
            await expect(visit.page.locator("#link")).to_have_text("live")
            yield stage, visit
            assert visit.complaints == []


async def scene(stage: Stage) -> Any:
    return (await stage.http.get(f"{stage.router.url}/kvloom/snapshot")).json()


def theme(page: Page) -> Any:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def columns(page: Page, lane: int) -> Any:
    return page.locator(".lane").nth(lane).locator(".turn")


async def test_the_page_says_at_a_glance_whether_reuse_works(chromium: Browser) -> None:
    """The router's own numbers: ratio, verdict, lanes, engines, decisions."""
    async with shown(chromium) as (stage, visit):
        page, data = visit.page, await scene(stage)
        ratio = round(100 * data["diagnosis"]["reuse_ratio"])
        await expect(page.locator("#ratio")).to_have_text(f"{ratio}%")
        await expect(page.locator("#headline")).to_have_text(
            data["diagnosis"]["headline"]
        )
        assert f"{ratio} % reuse" in await page.title()
        await expect(page.locator("#n-turns")).to_contain_text("7")
        await expect(page.locator("#n-conversations")).to_have_text("2")
        await expect(page.locator(".lane")).to_have_count(2)
        await expect(columns(page, 0)).to_have_count(3)
        await expect(columns(page, 1)).to_have_count(4)
        await expect(page.locator(".engine")).to_have_count(2)
        leased = page.locator(".engine").nth(1).locator(".legend")
        await expect(leased).to_contain_text("leased")
        rows = page.locator("#decisions tr")
        await expect(rows).to_have_count(7)
        await expect(rows.first).to_contain_text("Decode still held the last turn")
        await expect(rows.last).to_contain_text("first turn")
        label = await page.locator("#chart").get_attribute("aria-label")
        returned = sum(turn["returned_tokens"] for turn in data["receipts"])
        assert label is not None
        assert f"{returned:,} returned from decode" in label


async def test_a_turn_shows_while_it_runs_and_when_it_has_ended(
    chromium: Browser,
) -> None:
    """Without a reload, and at its place: lanes do not jump."""
    async with shown(chromium) as (stage, visit):
        page = visit.page
        gate = stage.cluster.decode[0].engine.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(converse(stage, "conversation-1", 1))
        await expect(page.locator(".turn.underway")).to_have_count(1)
        gate.set()
        await turn
        await expect(page.locator(".turn.underway")).to_have_count(0)
        await expect(columns(page, 1)).to_have_count(5)
        await expect(page.locator("#n-turns")).to_contain_text("8")


async def test_the_keyboard_is_enough(chromium: Browser) -> None:
    """Skip to the lanes, move between them, ask why, come back."""
    async with shown(chromium) as (stage, visit):
        page = visit.page
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        lanes = page.locator(".lane")
        await expect(lanes.nth(0)).to_be_focused()
        await page.keyboard.press("ArrowDown")
        await expect(lanes.nth(1)).to_be_focused()
        # What happens meanwhile does not take the focus away.
        await converse(stage, "conversation-2", 1)
        await expect(columns(page, 0)).to_have_count(4)
        await expect(lanes.nth(1)).to_be_focused()
        await page.keyboard.press("Enter")
        why = page.locator("#why")
        await expect(why).to_be_visible()
        await expect(why.locator("li")).to_have_count(4)
        await expect(why).to_contain_text("Decode still held the last turn")
        await expect(why).to_contain_text("d0 holds")
        # Nor where it comes back to.
        await converse(stage, "conversation-1", 1)
        await expect(columns(page, 1)).to_have_count(5)
        await page.keyboard.press("Escape")
        await expect(why).not_to_be_visible()
        await expect(lanes.nth(1)).to_be_focused()


async def test_a_conversation_is_explained_by_the_clients_own_id(
    chromium: Browser,
) -> None:
    """And one that is not known is said to be so."""
    async with shown(chromium) as (_, visit):
        page = visit.page
        await page.get_by_label("Explain a conversation").fill(
            CONVERSATION["X-Session-ID"]
        )
        await page.keyboard.press("Enter")
        await expect(page.locator("#why-summary")).to_contain_text("tokens reused")
        await page.keyboard.press("Escape")
        await page.get_by_label("Explain a conversation").fill("<b>nobody</b>")
        await page.get_by_role("button", name="Explain", exact=True).click()
        await expect(page.locator("#why-title")).to_have_text("Not known")


async def test_light_and_dark(chromium: Browser) -> None:
    """As the system has it, until somebody chooses; the choice stays."""
    async with shown(chromium, color_scheme="dark") as (stage, visit):
        page = visit.page
        dark = await theme(page)
        toggle = page.get_by_role("button", name="Theme")
        await toggle.click()
        await expect(toggle).to_have_text("Theme: light")
        light = await theme(page)
        assert light != dark
        await page.reload()
        await expect(toggle).to_have_text("Theme: light")
        assert await theme(page) == light
        await toggle.click()
        assert await theme(page) == dark
        origin = stage.router.url
        async with visiting(chromium, origin, color_scheme="light") as other:
            assert await theme(other.page) == light


@pytest.mark.parametrize("width", [WIDE, NARROW])
async def test_it_fits_the_screen(
    chromium: Browser, width: int, tmp_path: Path
) -> None:
    """Nothing sticks out to the side, on a desk or on a phone."""
    async with shown(chromium, width=width) as (_, visit):
        page = visit.page
        await expect(page.locator(".lane")).to_have_count(2)
        for what in ("document.documentElement", "document.querySelector('main')"):
            wide = await page.evaluate(f"{what}.scrollWidth - {what}.clientWidth")
            assert wide <= 0
        cut_off = await page.evaluate(
            "[...document.querySelectorAll('.card, .engine, .legend')]"
            ".filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert cut_off == 0
        picture = await page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert picture.startswith(b"\x89PNG")


async def test_who_wants_no_motion_gets_none(chromium: Browser) -> None:
    """`prefers-reduced-motion` holds for what is under way, too."""
    async with shown(chromium, reduced_motion="reduce") as (stage, visit):
        gate = stage.cluster.decode[0].engine.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(converse(stage, "conversation-3", 1))
        running = visit.page.locator(".turn.underway")
        await expect(running).to_have_css("animation-name", "none")
        gate.set()
        await turn


async def test_it_says_when_the_router_is_gone_and_finds_it_again(
    chromium: Browser,
) -> None:
    """Old numbers are never shown as live ones."""
    async with staged() as stage, visiting(chromium, stage.router.url) as visit:
        link = visit.page.locator("#link")
        await expect(link).to_have_text("live")
        port = stage.router.port
        await stage.router.stop()
        await expect(link).to_have_text("reconnecting …")
        await stage.restart_router(port=port)
        await converse(stage, "conversation-9", 1)
        await expect(link).to_have_text("live", timeout=20_000)
        await expect(visit.page.locator(".lane")).to_have_count(1)


async def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: Browser) -> None:
    """Where the router wants one, it goes with every request, as a bearer."""
    async with staged() as stage:
        asked: list[str | None] = []

        async def guard(route: Any) -> None:
            key = route.request.headers.get("authorization")
            asked.append(key)
            if key == "Bearer right":
                await route.continue_()
            else:
                body = json.dumps({"error": {"message": "a key, please"}})
                await route.fulfill(status=401, body=body)

        context = await chromium.new_context()
        page = await context.new_page()
        await page.route("**/kvloom/events", guard)
        await page.goto(stage.router.url + "/kvloom/")
        for key in ("wrong", "right"):
            await expect(page.locator("#login")).to_be_visible()
            await page.get_by_role("textbox", name="Admin key").fill(key)
            await page.keyboard.press("Enter")
        await expect(page.locator("#link")).to_have_text("live")
        assert asked == [None, "Bearer wrong", "Bearer right"]
        kept = await page.evaluate("[{...sessionStorage}, {...localStorage}]")
        assert kept[0] == {"kvloom-key": "right"}
        assert "right" not in json.dumps(kept[1])
        await context.close()


async def test_names_of_clients_are_text_and_nothing_else(chromium: Browser) -> None:
    """A model's name that is markup runs nothing."""
    async with shown(chromium) as (stage, visit):
        await stage.post(
            {"model": "<img src=x onerror=alert(1)>", "messages": opening()}
        )
        await converse(stage, "conversation-4", 1)
        await expect(visit.page.locator(".lane")).to_have_count(3)
        assert await visit.page.locator("img").count() == 0
