"""What every section of docs/benchmarks.md says of its run."""

from typing import Any


def machine(where: dict[str, Any]) -> str:
    """Where a file was measured, as a sentence."""
    loads = ", ".join(f"{load:g}" for load in where["load_average"])
    versions = ", ".join(
        f"{name} {version}" for name, version in where["packages"].items()
    )
    return (
        f"*{where['cpu']}, {where['num_cores']} cores, {where['memory_gib']:g} GiB, "
        f"{where['system']}, Python {where['python']}; load average before the run "
        f"{loads}; {where['date'][:10]}, commit {where['commit']}. {versions}.*"
    )


def command(where: dict[str, Any]) -> str:
    """How the file was made."""
    return f"    {where['command']}"
