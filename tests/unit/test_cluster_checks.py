"""What is said from the arguments alone, and the ready file's short life."""

import json

import pytest

from kvloom.protocol import ClusterKeyError
from kvloom_server.cluster.asked import UpSettings
from kvloom_server.cluster.checks import check_model, read_cluster_key
from kvloom_server.cluster.engine_args import Connector, Device
from kvloom_server.cluster.front import router_settings
from kvloom_server.cluster.launch import plan_slots
from kvloom_server.cluster.model import ModelUnavailableError
from kvloom_server.cluster.ready import ReadyFile, ReadyFileError


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "../no-such", "~/no-such"])
def test_a_path_without_a_model_is_refused(model):
    """With the path, and what is taken in its place."""
    with pytest.raises(ModelUnavailableError, match="hub id"):
        check_model(model)


@pytest.mark.parametrize("model", [None, "org/model", "model"])
def test_what_is_no_path_is_left_to_vllm(model):
    """The bundled model, and hub ids."""
    check_model(model)


def test_a_folder_that_exists_is_taken(tmp_path):
    """What is in it is vLLM's business."""
    check_model(str(tmp_path))


def test_a_cluster_key_is_read_without_its_line_end(tmp_path):
    """As the engines read it."""
    path = tmp_path / "key"
    path.write_text("sixteen bytes or more\n")
    assert read_cluster_key(path) == b"sixteen bytes or more"
    assert read_cluster_key(None) is None


def test_a_cluster_key_of_no_use_is_refused(tmp_path):
    """Missing, a folder, too short: the message names the file."""
    short = tmp_path / "short"
    short.write_text("short")
    for path in (short, tmp_path / "missing", tmp_path):
        with pytest.raises(ClusterKeyError, match=str(path)):
            read_cluster_key(path)


def test_the_ready_file_is_there_for_the_time_of_a_block(tmp_path):
    """Whole from the first moment, and nothing beside it afterwards."""
    path = tmp_path / "ready.json"
    path.write_text("stale")
    ready = ReadyFile(path)
    ready.clear()
    assert list(tmp_path.iterdir()) == []
    with ready.written({"url": "u"}):
        assert json.loads(path.read_text()) == {"url": "u"}
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == []


def test_the_ready_file_goes_also_after_a_failure(tmp_path):
    """Whatever ends the cluster."""
    ready = ReadyFile(tmp_path / "ready.json")
    with pytest.raises(ZeroDivisionError), ready.written({}):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_ready_file_is_no_must():
    """Without the option nothing is written."""
    ready = ReadyFile(None)
    ready.clear()
    with ready.written({}):
        pass


def test_a_ready_file_in_a_folder_that_is_not_there_is_refused(tmp_path):
    """The message says what is taken."""
    with pytest.raises(ReadyFileError, match="folder that exists"):
        ReadyFile(tmp_path / "no" / "ready.json").clear()


@pytest.mark.parametrize("connector", Connector)
def test_the_router_knows_every_lease_service(connector, tmp_path, monkeypatch):
    """Of both kinds, with our connector; with vLLM's own there is none, and no
    key, whatever the environment says."""
    key = tmp_path / "key"
    monkeypatch.setenv("KVLOOM_CLUSTER_KEY_FILE", str(tmp_path / "other"))
    slots = plan_slots(num_prefill=1, num_decode=1, device=Device.CPU)
    asked = UpSettings(connector=connector, cluster_key_file=key)
    settings = router_settings(asked, slots)
    addresses = [e.lease_address for e in (*settings.prefill, *settings.decode)]
    if connector is Connector.STOCK:
        assert addresses == [None, None]
        assert settings.cluster_key_file is None
    else:
        assert addresses == [slot.lease_address for slot in slots]
        assert settings.cluster_key_file == key


def test_every_rank_of_a_data_parallel_server_is_an_engine():
    """The router chooses the rank, because the rank holds the cache: one engine a
    rank, each with its lease service; and nobody else gets those ports."""
    asked = UpSettings(num_decode=2, decode_args=("--data-parallel-size", "2"))
    slots = plan_slots(
        num_prefill=1, num_decode=2, device=Device.CPU, args_of=asked.args_of
    )
    settings = router_settings(asked, slots)
    (prefill,) = settings.prefill
    assert prefill.rank is None
    assert [(e.url, e.rank) for e in settings.decode] == [
        (slot.url, rank) for slot in slots[1:] for rank in (0, 1)
    ]
    wanted = [slots[0].http_port, slots[0].side_port, slots[0].lease_port]
    for slot in slots[1:]:
        wanted += [slot.http_port, slot.side_port, slot.side_port + 1]
        wanted += [slot.lease_port, slot.lease_port + 1]
    assert len(set(wanted)) == len(wanted)
    assert [e.lease_address for e in settings.decode] == [
        f"tcp://127.0.0.1:{slot.lease_port + rank}"
        for slot in slots[1:]
        for rank in (0, 1)
    ]
