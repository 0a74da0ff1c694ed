"""vLLM's flags as vLLM reads them; pure.

What a user passes through decides things of ours too: how much memory, how many GPUs
and how many ranks an engine has, and which key its API asks for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SHORTEST: Final = {
    "--api-key": "--api-k",
    "--data-parallel-rank": "--data-parallel-ra",
    "--data-parallel-size-local": "--data-parallel-size-",
    "--data-parallel-start-rank": "--data-parallel-st",
    "--gpu-memory-utilization": "--gp",
    "--kv-cache-memory-bytes": "--kv-cache-mem",
    "--pipeline-parallel-size": "--pi",
    "--prefill-context-parallel-size": "--prefill-c",
    "--tensor-parallel-size": "--te",
}
"""How little of a flag means it and no other one; a test asks vLLM's parser."""
_SHORT: Final = {
    flag[:length]: flag
    for flag, shortest in SHORTEST.items()
    for length in range(len(shortest), len(flag))
}


def flag_value(args: Sequence[str], *names: str) -> str | None:
    """What a flag is given, in one word or in two; the last time counts.

    Args:
        args: vLLM's, as on its command line.
        names: of the flag, with dashes; vLLM also takes underscores, and what only
            one of its flags begins with.
    """
    value = None
    for number, arg in enumerate(args):
        name, equals, text = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if _SHORT.get(name, name) not in names:
            continue
        following = args[number + 1 : number + 2]
        value = text if equals else "".join(f for f in following if f[:1] != "-")
    return value


def api_key(args: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The key that an engine's API asks for; the first, where it takes several."""
    # As in vLLM: the flag, also where it is empty, before the variable.
    given = flag_value(args, "--api-key")
    return (environment.get("VLLM_API_KEY") if given is None else given) or None


def sizes_memory(args: Sequence[str]) -> bool:
    """Whether the flags say how much memory the KV gets."""
    return any(
        flag_value(args, name) is not None
        for name in ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The data-parallel ranks of one server: engines that share its URL."""

    first: int = 0
    """Its first rank's number among all servers': ports count from it."""
    count: int = 1

    @property
    def numbers(self) -> list[int | None]:
        """By which requests choose a rank of the server; ``None`` where it has one."""
        return [None] if self.count == 1 else list(range(self.count))


def ranks_of(args: Sequence[str]) -> Ranks:
    """The ranks of a server with these flags."""
    own = flag_value(args, "--data-parallel-rank", "-dpn")
    if own is not None and own.isdecimal():
        return Ranks(first=int(own))
    size = _number(args, "--data-parallel-size", "-dp")
    if flag_value(args, "--data-parallel-size-local", "-dpl") is None:
        # vLLM then has all ranks, whatever the number of the first is said to be.
        return Ranks(count=max(size, 1))
    count = _number(args, "--data-parallel-size-local", "-dpl")
    first = _number(args, "--data-parallel-start-rank", "-dpr", default=0)
    # With none of them a server only hands requests on, from a port of its own.
    return Ranks(first=first, count=max(count, 1))


def gpus_each(args: Sequence[str]) -> int:
    """How many GPUs a server with these flags takes."""
    each = ranks_of(args).count
    for names in _SPLITTING:
        each *= _number(args, *names)
    return each


_SPLITTING: Final = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
"""What one rank's model is split by."""


def _number(args: Sequence[str], *names: str, default: int = 1) -> int:
    """What is no number is left to vLLM to refuse."""
    try:
        return max(int(flag_value(args, *names) or ""), 0)
    except ValueError:
        return default
