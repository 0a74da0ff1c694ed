"""The pictures of the benchmarks' document; they need the extra ``bench``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .results import Row, figure, select


def plot_reuse(rows: Sequence[Row], path: Path) -> None:
    """TTFT of turns after the first over the history's length, a line a variant."""
    import matplotlib.pyplot as plt

    turns = [r for r in select(rows, row="reuse", error=None) if r["turn"] > 1]
    names = list(dict.fromkeys(row["variant"] for row in turns))
    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, cache in zip(axes, ("kept", "lost"), strict=True):
        for colour, name in zip(_MORE_COLOURS, names, strict=False):
            # One vLLM's cache is never lost.
            case = "kept" if name == "single" else cache
            mine = select(turns, variant=name, prefill_cache=case)
            mine.sort(key=lambda row: row["history_tokens"])
            at, ms = ([row[n] for row in mine] for n in ("history_tokens", "ttft_ms"))
            style = "--" if name == "single" else "o-"
            axis.plot(at, ms, style, color=colour, label=name, markersize=3)
        axis.set_title(f"TTFT, ms, by tokens of history; cache {cache}", fontsize=10)
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, ncols=2)
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def plot_router(rows: Sequence[Row], path: Path) -> None:
    """CPU a turn and a chunk, by proxy, with the spread."""
    import matplotlib.pyplot as plt

    names = {
        "kvloom": ("kvloom", False),
        "kvloom, returns": ("kvloom", True),
        "vllm-router": ("vllm-router", False),
        "fastapi-httpx": ("fastapi-httpx", False),
    }
    panels = (
        ("a turn, two legs", "cpu_us_per_request", {"streams": 8, "body_bytes": 2048}),
        ("a chunk, 32 streams", "cpu_us_per_chunk", {"streams": 32}),
    )
    drawn, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    for axis, (title, name, values) in zip(axes, panels, strict=True):
        measured = [
            figure(
                [row for row in rows if row.get(name) is not None],
                name,
                proxy=proxy,
                returns=returns,
                legs=2,
                **values,
            )
            for proxy, returns in names.values()
        ]
        middle = [each.median for each in measured]
        reach = [
            [each.median - each.low for each in measured],
            [each.high - each.median for each in measured],
        ]
        axis.barh(list(names), middle, xerr=reach, color=_COLOURS[: len(names)])
        axis.invert_yaxis()
        axis.set_title(f"CPU of {title}, µs", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def plot_simulate(rows: Sequence[Row], path: Path) -> None:
    """TTFT over the history's length, a line a mode."""
    import matplotlib.pyplot as plt

    cells = select(rows, row="simulate", basis="TTFT")
    models = list(dict.fromkeys(row["model"] for row in cells))
    drawn, axes = plt.subplots(1, len(models), figsize=(9, 3.2), layout="constrained")
    for axis, model in zip(axes, models, strict=True):
        mine = select(cells, model=model)
        for colour, mode in zip(
            _COLOURS, ("off", "lazy", "eager", "direct"), strict=True
        ):
            line = select(mine, mode=mode)
            style = "--" if mode == "direct" else "-"
            at, ms = ([row[n] for row in line] for n in ("prefix_tokens", "ttft_ms"))
            axis.plot(at, ms, style, color=colour, label=mode)
        known = [row for row in mine if row["published_ms"]]
        axis.scatter(
            [row["prefix_tokens"] for row in known],
            [row["published_ms"] for row in known],
            color="black",
            s=18,
            zorder=3,
            label="published",
        )
        axis.set_title(f"{model}: TTFT, ms, by tokens of history", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


_MORE_COLOURS: Final = (
    "black",
    "#c2410c",
    "#0369a1",
    "#6d28d9",
    "#15803d",
    "#a16207",
    "#be185d",
    "#475569",
)
_COLOURS: Final = ("#c2410c", "#0369a1", "#6d28d9", "#15803d")


PLOTS: Final[tuple[tuple[str, Callable[[Sequence[Row], Path], None]], ...]] = (
    ("reuse", plot_reuse),
    ("router", plot_router),
    ("simulate", plot_simulate),
)
"""By the name of the result file."""
