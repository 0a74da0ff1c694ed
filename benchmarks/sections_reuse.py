"""The sections of docs/benchmarks.md on what reuse gains."""

from collections.abc import Sequence
from typing import Any, Final

from sections import command, machine

from kvloom_server.bench import layouts
from kvloom_server.bench.results import Row, select
from kvloom_server.bench.reuse import TOOL_S
from kvloom_server.bench.reuse_aims import aim_rows
from kvloom_server.bench.reuse_rows import Variant, summary_rows
from kvloom_server.bench.tables import markdown

RIVALS: Final = """\
*stock* and *rival* have a second pair of engines, with vLLM's own connector, on the same
cores and with the same flags. *stock* is vLLM's bidirectional transfer, driven by the policy
of its multi-turn example: handles of the turn before, used once, nobody compares them with
the new history. *rival* is `vllm-router` with program scheduling. So that only reuse is
compared, their engines got what ours have: NIXL's progress thread pauses and the model keeps
its core; streams carry handles, which vLLM 0.32 gives in plain answers only, so that without
this addition *stock* would return nothing at all. Their tokens are as prefill's metrics say.
"""


def reuse(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench reuse``."""
    turns = select(rows, row="reuse")
    (tool_s,) = {row["tool_s"] for row in select(rows, row="reuse_effort")}
    return f"""\
## What reuse gains

{command(where)}

Conversations with a tool on one real prefill and one real decode engine (the bundled model
in float32, a core each), streamed, one turn at a time. All texts follow from a seed; each
turn's history holds the model's own answers, and {tool_s:g} s go by while a tool runs. The
same {_num_talks(turns)} conversations are played by each variant, one after another, in an order
that turns, and none finds what another left in a cache. *off*, *lazy*, *eager*, *direct*
(as *lazy*, but decode may do short turns alone, where an estimate says that it is faster: the
table by turn says what was done) and *auto* are routers in front of the same
two engines. *single*, the floor, is either engine in turn, asked directly as one ordinary vLLM:
the same flags and the same cores at nearly the same time, and no router in between. The other one
idles meanwhile, so it has one core, where a user may give it both. *lost*: prefill loses
its prefix cache when an answer begins, as one that serves others has by the next turn;
*single* never does. Nobody else used the engines,
and a CPU computes a prompt far more slowly than it moves KV: the gains on a GPU are
smaller.

{RIVALS}
{_verdict(rows)}

{machine(where)}

{_tables(turns)}

**By turn**

{markdown(turns, layouts.TURNS)}

![TTFT by history, by variant](benchmarks-reuse.png)
"""


def recorded(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench reuse --trace``."""
    turns = select(rows, row="reuse")
    return f"""\
### Recorded sessions

{command(where)}

From the first on, {_num_talks(turns)} of the sessions that somebody's agent for airline customers had (a policy as
system prompt, then the customer's and the tools' words as they were recorded; the answers are
the small model's own). The recording is not ours to publish; [own-sessions.md](own-sessions.md) says
how to measure yours. Pauses were not recorded, so each is {TOOL_S:g} s.

{_verdict(rows)}

{machine(where)}

{_tables(turns)}
"""


def _num_talks(turns: Sequence[Row]) -> int:
    return len({(row["conversation"], row["prefix_tokens"]) for row in turns})


def _verdict(rows: Sequence[Row]) -> str:
    turns = select(rows, row="reuse")
    stock = [row for row in turns if row["variant"] == Variant.STOCK]
    others = [row for row in turns if row["variant"] != Variant.STOCK]
    errors = sum(row["error"] is not None for row in turns)
    is_whole = bool(select(rows, row="reuse_summary"))
    cut = "" if is_whole else " The run was stopped before its last turns."
    return (
        f"Wrong answers (other tokens than one vLLM gave to the same prompt): "
        f"{_num_wrong(stock)} of {len(stock)} turns of *stock*, {_num_wrong(others)} of "
        f"{len(others)} of all others. Errors: {errors}.{cut}"
    )


def _num_wrong(turns: Sequence[Row]) -> int:
    return sum(bool(row["wrong"]) for row in turns)


def _tables(turns: Sequence[Row]) -> str:
    return f"""\
What *auto* is to reach, as medians over the turns after the first:

{markdown(aim_rows(turns), layouts.REUSE[1])}

All variants; smallest and largest in brackets, tokens by source are means. Few turns make a
cell: read what is far apart, not what is near. *Reused* counts the tokens that were not computed,
of those that prompt and history have in common. For *single* and for direct turns *local* is the
answering engine's cache.

{markdown(summary_rows(turns), layouts.REUSE[0])}"""
