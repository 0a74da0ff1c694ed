"""vLLM's flags, read as vLLM reads them."""

import json
import subprocess
import sys

import pytest

from kvloom_server.cluster.flags import (
    SHORTEST,
    Ranks,
    api_key,
    flag_value,
    gpus_each,
    ranks_of,
    sizes_memory,
)

# Ways to write the same, and what must not be taken for it.
WRITTEN = [
    ["--tensor-parallel-size=2"],
    ["--tensor-parallel-size", "2"],
    ["--tensor_parallel_size=2"],
    ["--tensor_parallel_size", "2"],
    ["-tp", "2"],
    ["-tp=2"],
    ["-tp=4", "--tensor-parallel-size", "2"],
    ["--tensor-parallel-size=4", "-tp", "2"],
    ["--tensor-parallel-size=2", "--pipeline-parallel-size", "3"],
    ["-pp", "3", "-pcp", "2", "--prefill_context_parallel_size=1"],
    ["-dp", "3", "-tp=2"],
    ["--data-parallel-size=4", "--data-parallel-size-local=2", "-dpr", "2"],
    ["--max-model-len", "2", "--seed=4"],
    ["--api-key", "one", "two", "-tp", "2"],
    ["--api_key=one", "--api-key=two"],
    ["--enforce-eager", "--kv-cache-memory-bytes", "2g"],
    ["--gpu_memory_utilization=0.5"],
    ["-dp", "4", "-dpr", "2"],
    ["-tp", "+2"],
    ["-tp= 2"],
    *(
        [f"{short}={'0.5' if short == '--gp' else '2'}"]
        for flag, short in SHORTEST.items()
        if flag != "--data-parallel-rank"
    ),
]
VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
told = []
for flags in json.loads(sys.argv[1]):
    a = parser.parse_args(flags)
    local = a.data_parallel_size_local
    count = a.data_parallel_size if local is None else local
    gpus = a.tensor_parallel_size * a.pipeline_parallel_size * count
    told.append([
        gpus * a.prefill_context_parallel_size,
        [(a.data_parallel_start_rank or 0) if local else 0, count],
        a.api_key[0] if a.api_key else None,
        a.kv_cache_memory_bytes is not None or
        a.gpu_memory_utilization != parser.get_default("gpu_memory_utilization"),
    ])
print(json.dumps(told))
"""


def test_flags_mean_what_they_mean_to_vllm():
    """In one word or in two, with dashes or underscores, short or long: the last
    one counts."""
    done = subprocess.run(
        [sys.executable, "-c", VLLM, json.dumps(WRITTEN)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for flags, expected in zip(WRITTEN, told, strict=True):
        ranks = ranks_of(flags)
        ours = [
            gpus_each(flags),
            [ranks.first, ranks.count],
            api_key(flags, {}),
            sizes_memory(flags),
        ]
        assert ours == expected, flags


def test_a_server_has_a_rank_at_least():
    """None of its own, or a number that vLLM refuses: it has a port all the same."""
    assert ranks_of(["-dp", "0"]) == Ranks()
    assert ranks_of(["-dp", "4", "-dpl", "0"]) == Ranks()


@pytest.mark.parametrize(
    "flags", [["-tp"], ["-tp", "--seed=2"], ["-tp=many"], ["--tensor-parallel-size="]]
)
def test_what_is_no_number_is_left_to_vllm_to_refuse(flags):
    """Its own message is the better one."""
    assert gpus_each(flags) == 1
    assert flag_value(flags, "--seed") in (None, "2")


def test_a_rank_with_a_server_of_its_own_is_one():
    """Whoever balances the load elsewhere starts one server a rank."""
    flags = ["--data-parallel-size=8", "--data-parallel-rank", "3"]
    assert ranks_of(flags) == Ranks(first=3)
    assert gpus_each(flags) == 1


def test_the_key_is_the_flags_before_the_variables():
    """As in vLLM; an empty one asks for nothing."""
    variable = {"VLLM_API_KEY": "theirs"}
    assert api_key([], variable) == "theirs"
    assert api_key(["--api-key=own"], variable) == "own"
    assert api_key(["--api-key="], variable) is None
    assert api_key([], {"VLLM_API_KEY": ""}) is None
