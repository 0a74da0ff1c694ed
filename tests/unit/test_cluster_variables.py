"""What variables and keys do to ``kvloom up``, with stand-ins for vLLM."""

import json
import signal
import urllib.error
import urllib.request

import pytest
from unit.stand_in_cluster import starter

from kvloom_server.cluster.asked import UpSettings
from kvloom_server.cluster.front import router_settings

KEY = "a key of the engines"


@pytest.fixture
def up(tmp_path):
    return starter(tmp_path)


def status_of(url, **headers):
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers)
        ) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def served_at(url):
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        return [model["id"] for model in json.load(response)["data"]]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ([], {"VLLM_API_KEY": KEY}),
        ([f"--engine-arg=--api-key={KEY}"], {"VLLM_API_KEY": "another"}),
        (
            [
                "--decode-arg=--stand-in=locked",
                "--engine-arg=--api-key=a key of its own",
            ],
            {},
        ),
        (
            ["--engine-arg=--stand-in=locked"],
            {"KVLOOM_UPSTREAM_API_KEY": "a key of its own"},
        ),
    ],
)
def test_engines_that_ask_for_a_key_get_it(up, flags, variables):
    """By vLLM's variable, by its flag, or by the router's own setting: the cluster
    comes up, and its router serves what the engines serve."""
    with up(*flags, variables=variables) as cluster:
        cluster.until("Ctrl-C stops")
        assert served_at(cluster.told()["url"]) == ["m"]
        assert cluster.end(signal.SIGINT) == 0
    assert KEY not in cluster.text


def test_a_key_that_nobody_told_is_asked_for(up):
    """The engine's answer is no crash: one sentence, with the setting that mends it."""
    with up("--engine-arg=--stand-in=locked") as cluster:
        assert cluster.end() == 1
    assert "Traceback" not in cluster.text
    assert "engine p0 asks for an API key" in cluster.text
    assert "KVLOOM_UPSTREAM_API_KEY" in cluster.text
    assert not cluster.ready.exists()


def test_two_keys_are_refused_before_engines_load(up, tmp_path):
    """The router sends one to all of them."""
    with up("--prefill-arg=--api-key=one", "--decode-arg=--api-key=two") as cluster:
        assert cluster.end() == 1
    assert "the same with --engine-arg=--api-key" in cluster.text
    assert cluster.text.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_what_is_for_serve_alone_does_not_change_a_local_cluster(up):
    """Its address is http on loopback, as its ready file says, and its engines are
    its own, whatever a shell that is meant for `kvloom serve` has set."""
    variables = {
        "KVLOOM_HOST": "0.0.0.0",
        "KVLOOM_TLS_CERT": "/no/such/cert.pem",
        "KVLOOM_ENGINES_FILE": "/no/such/engines.toml",
        "KVLOOM_UPSTREAM_CA_FILE": "/no/such/ca.pem",
    }
    with up(variables=variables) as cluster:
        cluster.until("Ctrl-C stops")
        url = cluster.told()["url"]
        assert url.startswith("http://127.0.0.1:")
        assert served_at(url) == ["m"]
        assert cluster.end(signal.SIGINT) == 0


def test_client_keys_hold_for_up(up, tmp_path):
    """They are for whoever shares a machine."""
    keys = tmp_path / "keys.toml"
    keys.write_text('me = "sixteen bytes or more"\n')
    with up(variables={"KVLOOM_CLIENT_KEYS_FILE": str(keys)}) as cluster:
        cluster.until("Ctrl-C stops")
        models = cluster.told()["url"] + "/v1/models"
        assert status_of(models) == 401
        assert status_of(models, Authorization="Bearer sixteen bytes or more") == 200
        cluster.end(signal.SIGINT)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVLOOM_CLIENT_KEYS_FILE", "/no/such/keys.toml"),
        ("KVLOOM_HANDLE_KEY", "short"),
        ("KVLOOM_MAX_WAITING", "-1"),
    ],
)
def test_a_variable_of_no_use_is_said_before_engines_load(
    up, tmp_path, variable, value
):
    """In one sentence that names it, or its file."""
    with up(variables={variable: value}) as cluster:
        assert cluster.end() == 1
    assert cluster.text.startswith("error: ")
    assert variable in cluster.text or value in cluster.text
    assert cluster.text.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_demo_and_benchmarks_need_no_key(monkeypatch, tmp_path):
    """They are their cluster's only clients, and know none."""
    for name in ("CLIENT_KEYS_FILE", "ADMIN_KEYS_FILE"):
        monkeypatch.setenv(f"KVLOOM_{name}", str(tmp_path / name))
    settings = router_settings(UpSettings(), [])
    assert settings.client_keys_file is None
    assert settings.admin_keys_file is None
    kept = router_settings(UpSettings(is_open=False), [])
    assert kept.client_keys_file == tmp_path / "CLIENT_KEYS_FILE"
