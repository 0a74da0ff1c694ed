"""The connector's settings: what an operator may write, and what is refused."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_connector.settings import (
    UPSTREAM_KEYS,
    ConnectorSettings,
    SettingsError,
)

EVERY_KEY = {
    "bidirectional_kv_xfer": False,
    "decoder_kv_blocks_ttl": 30.5,
    "kv_recompute_threshold": 0,
    "lease_host": "10.0.0.7",
    "lease_port": 65535,
    "handover_recompute_threshold": 32,
    "cluster_key_file": "/run/kvloom/key",
    "claim_timeout_s": 1.5,
    "claim_lifetime_s": 10.0,
    "max_leased_fraction": 0.25,
    "nixl_progress_delay_us": 100,
}


def test_every_setting_is_taken_as_written():
    """Each key of the table in the docs reaches the engine unchanged."""
    settings = ConnectorSettings.of_extra_config(EVERY_KEY)
    assert {f.name: getattr(settings, f.name) for f in fields(settings)} == EVERY_KEY


def test_nothing_written_gives_the_documented_defaults():
    """Upstream's names keep upstream's defaults; returns are on."""
    settings = ConnectorSettings.of_extra_config({})
    assert settings == ConnectorSettings()
    assert settings.bidirectional_kv_xfer is True
    assert settings.decoder_kv_blocks_ttl == 480
    assert settings.kv_recompute_threshold == 64
    assert settings.max_leased_fraction == 0.5
    assert settings.claim_timeout_s == 0.25
    assert settings.lease_host == "127.0.0.1"


def test_upstreams_own_keys_pass():
    """What vLLM's NIXL classes read themselves is none of our business."""
    extra = {key: "anything" for key in UPSTREAM_KEYS}
    assert ConnectorSettings.of_extra_config(extra) == ConnectorSettings()


def test_unknown_keys_are_all_named():
    """A typing error is found at start, with the names that would be right."""
    extra = {"decoder_kv_block_ttl": 1, "colour": "red", "lease_port": 1}
    with pytest.raises(SettingsError) as caught:
        ConnectorSettings.of_extra_config(extra)
    message = str(caught.value)
    assert "colour, decoder_kv_block_ttl;" in message
    assert all(name in message for name in EVERY_KEY)


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("bidirectional_kv_xfer", "true", "bool"),
        ("bidirectional_kv_xfer", 1, "bool"),
        ("decoder_kv_blocks_ttl", "480", "float"),
        ("decoder_kv_blocks_ttl", True, "float"),
        ("decoder_kv_blocks_ttl", None, "float"),
        ("kv_recompute_threshold", 64.0, "int"),
        ("kv_recompute_threshold", True, "int"),
        ("lease_host", 127, "str"),
        ("lease_port", "5600", "int"),
        ("claim_timeout_s", [0.25], "float"),
        ("claim_lifetime_s", {}, "float"),
        ("max_leased_fraction", "half", "float"),
        ("nixl_progress_delay_us", 1.5, "int"),
        ("nixl_progress_delay_us", False, "int"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(key, value, want):
    """Nothing is guessed from a string or a truth value."""
    with pytest.raises(SettingsError, match=f"^{key} must be {want}, not "):
        ConnectorSettings.of_extra_config({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_kv_blocks_ttl", 0),
        ("decoder_kv_blocks_ttl", -1.0),
        ("decoder_kv_blocks_ttl", float("inf")),
        ("decoder_kv_blocks_ttl", float("nan")),
        ("decoder_kv_blocks_ttl", 10**400),
        ("kv_recompute_threshold", -1),
        ("lease_host", ""),
        ("lease_port", -1),
        ("lease_port", 65536),
        ("claim_timeout_s", 0),
        ("claim_timeout_s", 61),
        ("claim_timeout_s", float("nan")),
        ("claim_lifetime_s", 0),
        ("claim_lifetime_s", 0.5),
        ("claim_lifetime_s", float("inf")),
        ("max_leased_fraction", -0.1),
        ("max_leased_fraction", 1.01),
        ("max_leased_fraction", float("nan")),
        ("nixl_progress_delay_us", -1),
        ("nixl_progress_delay_us", 10**7),
    ],
)
def test_a_value_out_of_range_says_what_is_in_range(key, value):
    """The engine does not start with a setting that would make it hang, pin
    memory for ever or never reuse anything."""
    with pytest.raises(SettingsError, match=f"^{key}=.* must be "):
        ConnectorSettings.of_extra_config({key: value})


def test_an_int_passes_for_seconds():
    """JSON has one kind of number: 480 is 480.0 seconds."""
    settings = ConnectorSettings.of_extra_config({"decoder_kv_blocks_ttl": 480})
    assert type(settings.decoder_kv_blocks_ttl) is float


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from(sorted(EVERY_KEY)) | st.text(), JSON))
def test_any_json_object_is_taken_or_refused_with_a_sentence(extra):
    """Whatever ``--kv-transfer-config`` holds, the start succeeds or fails
    with one message that names a key."""
    said = ""
    try:
        settings = ConnectorSettings.of_extra_config(json.loads(json.dumps(extra)))
    except SettingsError as error:
        said = str(error)
    if said:
        assert any(key in said for key in extra)
    else:
        assert settings.claim_lifetime_s > 2 * settings.claim_timeout_s > 0


@pytest.mark.parametrize(
    ("host", "key_file", "is_open"),
    [
        ("127.0.0.1", "", False),
        ("::1", "", False),
        ("localhost", "", False),
        ("0.0.0.0", "", True),
        ("10.0.0.7", "", True),
        ("a-host", "", True),
        ("0.0.0.0", "/a/key", False),
    ],
)
def test_an_engine_knows_that_it_lets_in_everybody(host, key_file, is_open):
    """It then says so when it starts."""
    settings = ConnectorSettings(lease_host=host, cluster_key_file=key_file)
    assert settings.lets_in_everybody == is_open
