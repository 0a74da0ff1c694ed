"""``kvloom status``: what the operator's page shows, in a terminal."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import aiohttp
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .router.diagnosis import Verdict
from .said import plainly

TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0)
WATCH_S: Final = 1.0
MAX_LANES: Final = 8
MAX_TURNS: Final = 24
MAX_DECISIONS: Final = 8
_BAR: Final = 24

_KEY_NEEDED: Final = "asks for an admin key: --key, or KVLOOM_ADMIN_KEY"
_REFUSED: Final = "does not take this key: it is no admin's"

Json = dict[str, Any]


class StatusError(RuntimeError):
    """The router can't be asked; the message says what to do."""


async def show_status(
    console: Console, url: str, *, key: str | None, is_watching: bool
) -> None:
    """Print a router's state, once or until cancelled.

    Args:
        console: where to.
        url: the router's address, also as clients or browsers have it: without the
            scheme, with ``/v1`` or ``/kvloom/``.
        key: an admin key, where the router asks for one.
        is_watching: redraw every :data:`WATCH_S`.

    Raises:
        StatusError: there is no router at ``url``, or it wants another key.
    """
    url = root_of(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
        scene = await _scene(session, url)
        if not is_watching:
            console.print(drawn(scene, url))
            return
        with Live(drawn(scene, url), console=console, screen=False) as live:
            while True:
                await asyncio.sleep(WATCH_S)
                live.update(drawn(await _scene(session, url), url))


def root_of(url: str) -> str:
    """The router's root, of any address that is known for it."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/kvloom").removesuffix("/v1").rstrip("/")


async def _scene(session: aiohttp.ClientSession, url: str) -> Json:
    try:
        async with session.get(f"{url.rstrip('/')}/kvloom/snapshot") as answer:
            if answer.status in (401, 403):
                sent = "Authorization" in session.headers
                raise StatusError(f"{url} {_REFUSED if sent else _KEY_NEEDED}")
            if answer.status != 200:
                raise StatusError(f"{url} answers HTTP {answer.status}: no kvloom?")
            scene: Json = await answer.json()
            return scene
    except TimeoutError:
        raise StatusError(f"{url} does not answer in time") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise StatusError(
            f"no router answers at {url} ({plainly(error)}): start one with "
            "`kvloom up` or `kvloom serve`, or name another with --url"
        ) from None


def drawn(scene: Json, url: str) -> RenderableType:
    """The scene of ``/kvloom/snapshot`` as text."""
    tables = (
        _engines(scene["engines"]),
        _lanes(scene["lanes"], scene["now"]),
        _decisions(scene["receipts"]),
    )
    # A head without rows tells nothing.
    return Group(_verdict(scene, url), *(table for table in tables if table.row_count))


_COLOURS: Final = {
    Verdict.WORKING: "green",
    Verdict.PARTLY: "yellow",
    Verdict.FAILING: "red",
    Verdict.DOWN: "red",
}


def _verdict(scene: Json, url: str) -> RenderableType:
    found, ttft = scene["diagnosis"], scene["ttft"]
    colour = _COLOURS.get(Verdict(found["verdict"]), "default")
    lines = [_share(scene, url, colour), Text(found["headline"], style=colour)]
    for cause in found["causes"]:
        lines.append(Text(f"  {_count(cause['turns'], 'turn')}: {cause['text']}"))
        if cause["advice"]:
            lines.append(Text(f"      {cause['advice']}", style="dim"))
    numbers = (
        f"{_count(found['turns'], 'turn')}, {len(scene['underway'])} under way, "
        f"{scene['waiting']} in line, {found['failed']} failed; "
        f"{_count(scene['conversations'], 'conversation')}"
    )
    if ttft["median"] is not None:
        numbers += (
            f"; first token {_time(ttft['median'])} (median), "
            f"{_time(ttft['p95'])} (p95)"
        )
    return Group(*lines, Text(numbers, style="dim"))


def _share(scene: Json, url: str, colour: str) -> Text:
    """The one number, or that there is none."""
    ratio, minutes = scene["diagnosis"]["reuse_ratio"], scene["window_s"] // 60
    told: list[str | tuple[str, str]]
    told = [f"no prompt tokens were counted in the last {minutes} min"]
    if ratio is not None:
        share = (f"{ratio:.0%}", f"bold {colour}")
        told = [share, f" of prompt tokens came from a cache, last {minutes} min"]
    return Text.assemble(*told, (f"  {url}", "dim"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _engines(engines: Iterable[Json]) -> Table:
    table = _table("engine", "state", "KV memory", "", "in flight", "leases")
    for engine in engines:
        colour = {"up": "green", "resting": "yellow", "draining": "yellow"}.get(
            engine["state"], "red"
        )
        is_decode = engine["role"] == "decode"
        table.add_row(
            Text(f"{engine['name']} {engine['role']}"),
            Text(engine["state"], style=colour),
            _memory_bar(engine["memory"]),
            Text(_memory_text(engine["memory"], is_decode=is_decode), style="dim"),
            str(engine["in_flight"]),
            str(engine["leases"]) if is_decode else "",
        )
    return table


def _memory_bar(memory: Json | None) -> Text:
    if memory is None:
        return Text("")
    in_use, leased = (round(_BAR * memory[part]) for part in ("in_use", "leased"))
    free = max(_BAR - in_use - leased, 0)
    return Text.assemble(
        ("█" * in_use, "white"), ("█" * leased, "cyan"), ("░" * free, "dim")
    )


def _memory_text(memory: Json | None, *, is_decode: bool) -> str:
    if memory is None:
        return "not told"
    leased = f"leased {memory['leased']:.0%}, " if is_decode else ""
    return f"in use {memory['in_use']:.0%}, {leased}free {memory['free']:.0%}"


_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_SHADES: Final = {"reused": "cyan", "missed": "yellow"}


def _lanes(lanes: list[Json], now: float) -> Table:
    table = _table("conversation", "turns (as high as the prompt)", "reused", "last")
    for lane in lanes[:MAX_LANES]:
        turns = lane["turns"]
        last = turns[-1]
        table.add_row(
            _short(lane["conversation"]),
            _columns(turns[-MAX_TURNS:]),
            _reuse(last),
            Text(f"{max(now - last['at'], 0):.0f} s ago", style="dim"),
        )
    return table


def _columns(turns: list[Json]) -> Text:
    top = max((turn["prompt_tokens"] or 0 for turn in turns), default=0)
    text = Text()
    for turn in turns:
        tokens = turn["prompt_tokens"]
        if not tokens:
            text.append("·", style="dim")
            continue
        step = round((len(_BLOCKS) - 1) * tokens / top)
        text.append(_BLOCKS[step], style=_SHADES.get(turn["bearing"], "default"))
    return text


def _decisions(receipts: list[Json]) -> Table:
    table = _table("plan", "conversation", "why", "engines", "reused", "first token")
    for turn in reversed(receipts[-MAX_DECISIONS:]):
        failed = turn["outcome"] not in ("ok", "client_gone")
        engines = [name for name in (turn["prefill"], turn["decode"]) if name]
        table.add_row(
            Text(turn["plan"], style=_SHADES.get(turn["bearing"], "default")),
            _short(turn["conversation"]),
            Text(f"no whole answer: {turn['outcome']}" if failed else turn["why"]),
            Text(" → ".join(engines)),
            _reuse(turn),
            _time(turn["ttft_s"]),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold" if column == "why" else "ellipsis")
    return table


def _reuse(turn: Json) -> str:
    prompt, computed = turn["prompt_tokens"], turn["computed_tokens"]
    if not prompt or computed is None:
        return "not known"
    return f"{1 - computed / prompt:.0%} of {prompt}"


def _short(tag: str | None) -> str:
    return "-" if tag is None else f"{tag[:4]}·{tag[4:8]}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
