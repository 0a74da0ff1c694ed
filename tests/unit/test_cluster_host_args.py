"""``kvloom engine-args``: what it prints starts an engine that fits the others."""

import json
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom_connector.settings import ConnectorSettings
from kvloom_server.cli import app
from kvloom_server.cluster.engine_args import Role
from kvloom_server.cluster.host_args import Backend, HostEngine
from kvloom_server.settings import parse_engine

ENV = {"COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments):
    return CliRunner().invoke(app, ["engine-args", *arguments], env=ENV)


def transfer(command):
    flag = "--kv-transfer-config="
    (value,) = (arg for arg in command if arg.startswith(flag))
    return json.loads(value.removeprefix(flag))


LOOPBACK = ["127.0.0.1", "127.0.0.2", "localhost", "::1"]
hosts = st.sampled_from([*LOOPBACK, "10.0.0.2", "gpu-1.internal", "fd00::2"])
engines = st.builds(
    HostEngine,
    role=st.sampled_from(Role),
    model=st.sampled_from(["org/model", "/models/a model", "it's"]),
    address=hosts,
    backend=st.sampled_from(Backend),
    tensor_parallel=st.integers(1, 16),
    side_port=st.integers(1, 65535),
    lease_port=st.integers(1, 65535),
    gpus=st.sampled_from([(), ("0",), ("2", "3")]),
    lease_ttl_s=st.none() | st.floats(1, 1000),
    recompute_threshold=st.none() | st.integers(0, 10_000),
    max_leased_fraction=st.none() | st.floats(0, 1),
    engine_args=st.sampled_from([(), ("--max-model-len=1",)]),
)


@given(engines)
def test_the_shell_reads_what_was_meant(engine):
    """Quotes, spaces and all: the variables, then the command."""
    words = shlex.split(engine.as_shell().replace("\\\n", " "))
    count = len(engine.environment())
    variables = dict(word.split("=", 1) for word in words[:count])
    assert variables == engine.environment()
    assert words[count:] == engine.command()


@given(engines)
def test_the_connector_and_the_router_take_what_is_printed(engine):
    """Settings parse, the backend is vLLM's own key, the option names the ports."""
    config = transfer(engine.command())
    extra = config["kv_connector_extra_config"]
    settings = ConnectorSettings.of_extra_config(extra)
    assert settings.lease_port == engine.lease_port
    assert extra["backends"] == [engine.backend]
    assert settings.bidirectional_kv_xfer
    is_open = engine.address not in LOOPBACK
    everywhere = "::" if ":" in engine.address else "0.0.0.0"
    assert (settings.lease_host == everywhere) == is_open
    assert settings.lets_in_everybody == engine.is_reachable == is_open
    assert (f"--host={everywhere}" in engine.command()) == is_open
    option, value = engine.router_option().split(" ")
    assert option == f"--{engine.role}"
    spec = parse_engine(value)
    assert spec.lease_address is not None
    assert spec.lease_address.endswith(f":{engine.lease_port}")
    environment = engine.environment()
    # What vLLM and the lease service listen on is what the others are told.
    at = "127.0.0.1" if engine.address == "localhost" else engine.address
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == at
    assert spec.url.removeprefix("http://").startswith(f"[{at}]" if ":" in at else at)
    assert ("FI_PROVIDER" in environment) == (engine.backend is Backend.LIBFABRIC)


VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
extra = args.kv_transfer_config.kv_connector_extra_config
print(json.dumps([args.host, args.port, args.model, extra["backends"]]))
"""


def test_vllm_itself_knows_the_flags():
    """The command's flags are those of the installed vLLM."""
    engine = HostEngine(role=Role.DECODE, model="m", address="10.0.0.2")
    _, _, _, *flags = engine.command()
    done = subprocess.run(
        [sys.executable, "-c", VLLM, *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == ["0.0.0.0", 8200, "m", ["UCX"]]


def test_the_command_prints_text_for_a_shell_and_json_for_programs():
    """On standard output only what can be used as it is."""
    common = ["--role=decode", "--model=m", "--address=10.0.0.2", "--tp=8"]
    shell = run(*common)
    assert shell.exit_code == 0, shell.output
    assert "--tensor-parallel-size=8" in shell.stdout
    assert shell.stdout.rstrip().splitlines()[-1].strip().startswith("--")
    told = json.loads(run(*common, "--json").stdout)
    assert told["router_option"].startswith("--decode http://10.0.0.2:8200,lease=")
    assert "--tensor-parallel-size=8" in told["command"]


def test_the_router_is_told_of_every_rank():
    """Of a data-parallel server; a rank that is a server of its own is one engine."""
    flags = ["--role=decode", "--model=m", "--address=10.0.0.2", "--json"]
    ranks = ["--engine-arg=--data-parallel-size", "--engine-arg=2"]
    told = json.loads(run(*flags, *ranks).stdout)
    at = "--decode http://10.0.0.2:8200,lease=tcp://10.0.0.2"
    assert told["router_option"] == f"{at}:6600,rank=0 {at}:6601,rank=1"
    options = told["router_option"].replace("--decode ", "").split(" ")
    assert [parse_engine(option).rank for option in options] == [0, 1]
    assert json.loads(run(*flags).stdout)["router_option"] == f"{at}:6600"
    own = json.loads(run(*flags, *ranks, "--engine-arg=-dpn=3").stdout)
    assert own["router_option"] == f"{at}:6603"


def test_an_open_lease_service_is_warned_of():
    """Beyond loopback without a key; not with one, and not on loopback."""
    common = ["--role=prefill", "--model=m"]
    assert "cluster-key-file" in run(*common, "--address=10.0.0.1").stderr
    assert "cluster-key-file" in run(*common, "--lease-host=0.0.0.0").stderr
    with_key = ("--address=10.0.0.1", "--cluster-key-file=/k")
    assert "note" not in run(*common, *with_key).stderr
    assert "note" not in run(*common).stderr
    assert "note" not in run(*common, "--address=localhost").stderr


@pytest.mark.parametrize(
    "wrong",
    [("--role=router",), ("--backend=TCP",), ("--tp=0",), ("--max-leased-fraction=2",)],
)
def test_what_can_not_be_is_refused(wrong):
    """With the option that is wrong."""
    done = run("--role=decode", "--model=m", *wrong)
    assert done.exit_code == 2
    assert wrong[0].split("=")[0] in done.output
