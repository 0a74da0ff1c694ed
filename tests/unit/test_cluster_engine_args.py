"""The command, environment, cores and ports of a cluster's engines."""

import dataclasses
import json
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_connector.settings import ConnectorSettings
from kvloom_server.cluster.engine_args import (
    CPU_RECOMPUTE_THRESHOLD,
    Connector,
    Device,
    EngineSlot,
    ModelChoice,
    Recipe,
    Role,
    engine_command,
    engine_environment,
    share_cores,
)
from kvloom_server.cluster.launch import ClusterError, plan_slots
from kvloom_server.cluster.ports import free_ports

PREFILL = EngineSlot(
    name="p0",
    role=Role.PREFILL,
    http_port=8001,
    side_port=5601,
    lease_port=6601,
    cores=(0, 2),
)
DECODE = EngineSlot(
    name="d0", role=Role.DECODE, http_port=8002, side_port=5602, lease_port=6602
)
BUNDLED = ModelChoice(
    path="/models/small", served_name="small", chat_template="/t.jinja", is_bundled=True
)
OWN = ModelChoice(path="org/model", served_name="org/model")


def recipe(model=BUNDLED, device=Device.CPU, **options):
    return Recipe(model=model, device=device, **options)


def transfer(command):
    """vLLM's KV-transfer configuration in a command."""
    flag = "--kv-transfer-config="
    (value,) = (arg for arg in command if arg.startswith(flag))
    return json.loads(value.removeprefix(flag))


@pytest.mark.parametrize("slot", [PREFILL, DECODE], ids=lambda slot: slot.name)
@pytest.mark.parametrize("is_returning", [True, False])
def test_the_connector_takes_what_the_recipe_gives_it(slot, is_returning):
    """Both engines load ours, each with its role, and its settings parse."""
    config = transfer(engine_command(slot, recipe(is_returning=is_returning)))
    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_connector_module_path"] == "kvloom_connector.connector"
    assert config["kv_buffer_device"] == "cpu"
    assert config["kv_role"] == ("kv_producer" if slot is PREFILL else "kv_consumer")
    settings = ConnectorSettings.of_extra_config(config["kv_connector_extra_config"])
    assert settings.bidirectional_kv_xfer is is_returning
    assert settings.lease_port == slot.lease_port
    assert settings.kv_recompute_threshold == CPU_RECOMPUTE_THRESHOLD


def test_the_stock_connector_gets_nothing_of_ours():
    """``--connector stock`` is stock vLLM, for comparison."""
    config = transfer(engine_command(DECODE, recipe(connector=Connector.STOCK)))
    assert "kv_connector_module_path" not in config
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": False}


def test_a_gpu_host_gets_vllms_own_defaults():
    """With a GPU and one's own model nothing of the small machine's is set."""
    slot = EngineSlot(
        name="d1",
        role=Role.DECODE,
        http_port=1,
        side_port=2,
        lease_port=3,
        gpus=("2", "3"),
    )
    choice = recipe(OWN, Device.CUDA)
    command = engine_command(slot, choice)
    assert command[:3] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    assert "--model=org/model" in command
    flags = {arg.split("=")[0] for arg in command}
    assert not flags & {"--dtype", "--enforce-eager", "--max-model-len", "--block-size"}
    assert (
        "kv_recompute_threshold" not in transfer(command)["kv_connector_extra_config"]
    )
    env = engine_environment(slot, choice)
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not {"HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"} & set(env)


def test_what_a_user_passes_stands_last():
    """``--engine-arg`` and ``--decode-arg`` override ours: vLLM takes a flag's
    last value, the engine's own over everybody's."""
    choice = recipe(
        engine_args=("--dtype=float32", "--seed=1"),
        prefill_args=("--seed=2",),
        decode_args=("--seed=3", "--num-gpu-blocks-override=110"),
    )
    assert engine_command(PREFILL, choice)[-3:] == [
        "--dtype=float32",
        "--seed=1",
        "--seed=2",
    ]
    assert engine_command(DECODE, choice)[-4:] == [
        "--dtype=float32",
        "--seed=1",
        "--seed=3",
        "--num-gpu-blocks-override=110",
    ]


def test_extra_settings_override_ours():
    """What a user sets of the connector wins over the recipe."""
    choice = recipe(extra_config={"lease_port": 9, "max_leased_fraction": 0.1})
    extra = transfer(engine_command(DECODE, choice))["kv_connector_extra_config"]
    assert (extra["lease_port"], extra["max_leased_fraction"]) == (9, 0.1)


def test_each_engine_has_an_environment_of_its_own():
    """Side channels do not meet, the bundled model asks no hub, and the
    endpoint that resets the prefix cache is there only where it was asked for."""
    first = engine_environment(PREFILL, recipe())
    second = engine_environment(DECODE, recipe(has_dev_endpoints=True))
    assert first["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
    assert second["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5602"
    assert first["HF_HUB_OFFLINE"] == "1"
    assert first["VLLM_NO_USAGE_STATS"] == "1"
    assert (first["OMP_NUM_THREADS"], first["VLLM_CPU_OMP_THREADS_BIND"]) == (
        "2",
        "0,2",
    )
    assert "OMP_NUM_THREADS" not in second
    assert "VLLM_SERVER_DEV_MODE" not in first
    assert second["VLLM_SERVER_DEV_MODE"] == "1"
    assert all(isinstance(value, str) for value in (first | second).values())


def test_a_user_decides_how_much_memory_the_kv_gets():
    """By vLLM's variable or by its flags, for all engines or for one; else it is
    1 GiB, so that a small machine holds both. vLLM lets the variable win over the
    flags: ours must not be there then."""
    space = "VLLM_CPU_KVCACHE_SPACE"
    assert engine_environment(DECODE, recipe())[space] == "1"
    for variables in ({space: "4"}, {space: "1", "PATH": "/bin"}):
        own = engine_environment(DECODE, recipe(), inherited=variables)
        assert space not in own
    # Empty it is none to vLLM either.
    assert engine_environment(DECODE, recipe(), inherited={space: ""})[space] == "1"
    for flags in (
        ("--kv-cache-memory-bytes=4g",),
        ("--kv_cache_memory_bytes", "4g"),
        ("--gpu-memory-utilization=0.3",),
    ):
        both = recipe(engine_args=flags)
        assert space not in engine_environment(PREFILL, both)
        one = recipe(decode_args=flags)
        assert space not in engine_environment(DECODE, one)
        assert engine_environment(PREFILL, one)[space] == "1"


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=64, unique=True),
    st.integers(1, 8),
)
def test_cores_are_shared_fairly(cores, num_engines):
    """Every engine has a core, no two the same one while there are enough, all
    as many, and one is left for the router where that costs nobody his."""
    shares = share_cores(cores, num_engines)
    assert len(shares) == num_engines
    assert len({len(share) for share in shares}) == 1
    given_out = [core for share in shares for core in share]
    assert set(given_out) <= set(cores)
    assert given_out
    if len(cores) >= num_engines:
        assert len(given_out) == len(set(given_out))
    if len(cores) > num_engines:
        assert len(given_out) < len(cores)


@given(st.integers(0, 4), st.integers(1, 4), st.sampled_from(Device))
def test_slots_never_share_a_port(num_prefill, num_decode, device):
    """However many engines: every port is another, names say the role, and
    each has its own GPU on a GPU host."""
    slots = plan_slots(num_prefill=num_prefill, num_decode=num_decode, device=device)
    assert [slot.name for slot in slots] == [
        *(f"p{number}" for number in range(num_prefill)),
        *(f"d{number}" for number in range(num_decode)),
    ]
    ports = [p for s in slots for p in (s.http_port, s.side_port, s.lease_port)]
    assert len(ports) == len(set(ports))
    gpus = [slot.gpus for slot in slots]
    if device is Device.CUDA:
        assert gpus == [(str(number),) for number in range(len(slots))]
        assert all(slot.cores == () for slot in slots)
    else:
        assert gpus == [()] * len(slots)
        assert all(slot.cores for slot in slots)


def test_a_large_engine_gets_as_many_gpus_as_its_flags_ask_for(monkeypatch):
    """Tensor parallelism takes several GPUs, out of those that are allowed; each
    role by its own flags, however they are written."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    large = recipe(engine_args=("--tensor-parallel-size", "2"))
    options = {"num_decode": 1, "device": Device.CUDA}
    slots = plan_slots(num_prefill=1, **options, args_of=large.args_of)
    assert [slot.gpus for slot in slots] == [("4", "5"), ("6", "7")]
    with pytest.raises(ClusterError, match=r"need 6 GPUs .* allows 4"):
        plan_slots(num_prefill=2, **options, args_of=large.args_of)
    uneven = recipe(
        engine_args=("-tp=4",),
        prefill_args=("--tensor_parallel_size=1",),
        decode_args=("-tp", "3"),
    )
    slots = plan_slots(num_prefill=1, **options, args_of=uneven.args_of)
    assert [slot.gpus for slot in slots] == [("4",), ("5", "6", "7")]


def test_cpu_engines_ask_for_no_gpu(monkeypatch):
    """`CUDA_VISIBLE_DEVICES=-1` hides GPUs that nobody wants here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    slots = plan_slots(num_prefill=1, num_decode=1, device=Device.CPU)
    assert [slot.gpus for slot in slots] == [(), ()]
    with pytest.raises(ClusterError, match=r"need 2 GPUs .* allows 0"):
        plan_slots(num_prefill=1, num_decode=1, device=Device.CUDA)


def test_an_engine_on_one_core_runs_its_model_itself():
    """A worker process that waits would take half of the core."""
    slot = EngineSlot(
        name="p0",
        role=Role.PREFILL,
        http_port=1,
        side_port=2,
        lease_port=3,
        cores=(0,),
    )
    command = engine_command(slot, recipe(OWN, Device.CPU))
    assert any("UniProcExecutor" in arg for arg in command)
    command = engine_command(
        dataclasses.replace(slot, cores=(0, 1)), recipe(OWN, Device.CPU)
    )
    assert not any("UniProcExecutor" in arg for arg in command)


def test_free_ports_can_be_bound():
    """What was found free is free, on loopback, and all different."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
    assert free_ports(0) == []


def test_free_ports_stay_free_while_others_connect():
    """They are no ports that the kernel gives to connections meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ephemeral = server.getsockname()[1]
        for _ in range(50):
            with socket.create_connection(server.getsockname()) as client:
                assert client.getsockname()[1] not in free_ports(6)
    assert max(free_ports(100)) < ephemeral


def test_a_slot_says_where_it_is():
    """The router finds an engine's HTTP side and its leases on loopback."""
    assert DECODE.url == "http://127.0.0.1:8002"
    assert DECODE.lease_address == "tcp://127.0.0.1:6602"
