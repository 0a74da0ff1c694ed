"""What the demo's agent prints is told to those who have never seen it."""

import re
import subprocess
import sys

import readme
from e2e.served import Served, served
from readme import ROOT


def played(here: Served, *options: str) -> str:
    """What ``examples/tool_loop.py`` prints; it must end well."""
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / "tool_loop.py")),
            *(f"--base-url={here.base_url}", f"--model={here.model}", *options),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tables(printed: str) -> list[str]:
    """Each case from its title on."""
    return re.split(r"(?=prefill's own cache )", printed)[1:]


def test_each_table_says_what_is_to_be_seen_in_it() -> None:
    """Ratios around 1.0 are no failure where prefill has it all; and every column
    that needs it is explained."""
    with served() as here:
        prefill = [f"--prefill={server.url}" for server in here.stage.cluster.prefill]
        kept, lost = tables(played(here, *prefill))

    assert "next to nothing to win here" in kept
    assert "all comes back from decode" in lost
    for table in (kept, lost):
        for column in ("common", "own", "returned", "computed", "TTFT", "ratio"):
            assert f"{column}:" in table, column


def test_turns_that_decode_does_alone_have_dashes_and_a_hint() -> None:
    """As on a plain ``kvloom up``; where there are none, nothing is said of them."""
    with served(settings={"direct_tokens": 512}) as here:
        printed = played(here)
    with served() as here:
        without = played(here)

    assert "direct: short" in printed
    assert "None" not in printed
    assert "KVLOOM_DIRECT_TOKENS=0 kvloom up" in printed
    assert "direct" not in without


def test_the_readme_names_both_cases() -> None:
    """Whoever sees the first table is not to stop there."""
    text = " ".join(readme.README.read_text().split())
    assert "It prints two tables" in text
    assert "next to nothing to win" in text
    assert "all of it comes back from decode" in text
