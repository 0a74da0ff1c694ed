"""Who is measured beside kvloom: how their engines and proxies are started."""

import json
import os

import pytest

from kvloom_server.bench.processes import without_settings
from kvloom_server.bench.rivals import (
    BLOCKS_TTL_S,
    SHORT_TTL_S,
    rival_command,
    stock_proxy_command,
    stock_settings,
)
from kvloom_server.cluster.engine_args import (
    CPU_RECOMPUTE_THRESHOLD,
    Connector,
    Device,
    EngineSlot,
    ModelChoice,
    Recipe,
    Role,
    engine_command,
)


def command_of(role: Role, connector: Connector) -> list[str]:
    """How the engine of a role is started, of kvloom's pair or of the stock one."""
    stock = stock_settings(Device.CPU)
    is_stock = connector is Connector.STOCK
    slot = EngineSlot(
        name="e", role=role, http_port=1, side_port=2, lease_port=3, cores=(0,)
    )
    recipe = Recipe(
        model=ModelChoice(path="m", served_name="m", is_bundled=True),
        device=Device.CPU,
        connector=connector,
        has_dev_endpoints=True,
        prefill_args=stock.prefill_args if is_stock else (),
        decode_args=stock.decode_args if is_stock else (),
    )
    return engine_command(slot, recipe)


TRANSFER = "--kv-transfer-config="


@pytest.mark.parametrize("role", Role)
def test_both_pairs_have_the_same_flags(role: Role) -> None:
    """But for the connector's, and for the handles that stock streams lack."""
    ours, theirs = (
        [word for word in command_of(role, c) if not word.startswith(TRANSFER)]
        for c in (Connector.KVLOOM, Connector.STOCK)
    )
    added = [word for word in theirs if word not in ours]
    assert theirs == [*ours, *added]
    names = [word.partition("=")[0] for word in added]
    assert names == (["--middleware"] if role is Role.DECODE else [])


@pytest.mark.parametrize("role", Role)
def test_stock_engines_return_as_much_as_ours(role: Role) -> None:
    """The last of two transfer configurations counts, and returns from as few tokens
    on as kvloom's does."""
    *_, last = (
        word.removeprefix(TRANSFER)
        for word in command_of(role, Connector.STOCK)
        if word.startswith(TRANSFER)
    )
    config = json.loads(last)
    extra = config["kv_connector_extra_config"]
    assert config["kv_connector"] == "NixlConnector"
    assert extra["bidirectional_kv_xfer"] is True
    assert extra["kv_recompute_threshold"] == CPU_RECOMPUTE_THRESHOLD
    is_prefill = role is Role.PREFILL
    assert config["kv_role"] == ("kv_producer" if is_prefill else "kv_consumer")


def test_handles_are_too_old_before_blocks_are() -> None:
    """As in vLLM's example: a handle is not used where decode may have let go."""
    for ttl_s in (SHORT_TTL_S, BLOCKS_TTL_S):
        command = stock_proxy_command("p", "d", 1, ttl_s=ttl_s)
        assert f"--ttl={ttl_s - 6}" in command
        (arg,) = stock_settings(Device.CPU, ttl_s=ttl_s).prefill_args
        assert f'"decoder_kv_blocks_ttl": {ttl_s}' in arg


def test_the_rival_has_program_scheduling_on() -> None:
    """By its own flags: none that it does not know, for it refuses those."""
    command = rival_command("http://p:1", "http://d:2", (3, 4))
    assert "--enable-program-scheduling" in command
    (config,) = (
        json.loads(word.partition("=")[2])
        for word in command
        if word.startswith("--program-scheduling-config-json=")
    )
    assert config["program_scheduling_enable_key"] == "auto"
    assert config["pd"]["warm_remote"] is True


def test_settings_of_the_user_are_gone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And back after it; the model's folder is no setting of what is measured."""
    monkeypatch.setenv("KVLOOM_RETURNS", "off")
    monkeypatch.setenv("KVLOOM_CACHE_DIR", "/models")
    with without_settings():
        assert "KVLOOM_RETURNS" not in os.environ
        assert os.environ["KVLOOM_CACHE_DIR"] == "/models"
    assert os.environ["KVLOOM_RETURNS"] == "off"
