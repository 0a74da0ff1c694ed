"""What an operator can set, and what is refused at start."""

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from kvloom_server.router import build_app
from kvloom_server.settings import EngineSpec, RouterSettings, parse_engine


def test_an_engine_is_its_url_and_its_lease_service() -> None:
    """Engines are given as one word each."""
    assert parse_engine("http://h:1/") == EngineSpec(url="http://h:1")
    assert parse_engine("http://h:1,lease=tcp://h:2") == EngineSpec(
        url="http://h:1", lease_address="tcp://h:2"
    )


@pytest.mark.parametrize(
    "text",
    ["", "h:1", "tcp://h:1", "http://h:1,lease=h:2", "http://h:1,x=y", "http://["],
)
def test_another_form_of_engine_is_refused_with_the_right_one(text: str) -> None:
    """A mistyped engine stops the start and shows how it is written."""
    with pytest.raises(ValueError, match="http://host:port"):
        parse_engine(text)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting has a variable; arguments come first."""
    monkeypatch.setenv("KVLOOM_PREFILL", "http://a:1 http://b:1")
    monkeypatch.setenv("KVLOOM_DECODE", "http://c:1,lease=tcp://c:2")
    monkeypatch.setenv("KVLOOM_RETURNS", "off")
    monkeypatch.setenv("KVLOOM_PORT", "9000")
    read = RouterSettings(port=9001)
    assert [engine.url for engine in read.prefill] == ["http://a:1", "http://b:1"]
    assert read.decode[0].lease_address == "tcp://c:2"
    assert (read.returns, read.port) == ("off", 9001)


def test_a_wrong_setting_is_refused_by_name() -> None:
    """A start with a setting out of range fails and names it."""
    with pytest.raises(ValidationError, match="handle_wait_s"):
        RouterSettings(handle_wait_s=-1)
    with pytest.raises(ValidationError, match="prefil"):
        RouterSettings.model_validate({"prefil": "http://a:1"})


def test_the_handle_key_comes_from_one_place_and_is_long_enough(tmp_path: Path) -> None:
    """A key that protects nothing is refused, and how to make one is said."""
    file = tmp_path / "key"
    file.write_text("a key of sixteen bytes or more\n")
    assert RouterSettings(handle_key_file=file).secret() == file.read_bytes().strip()
    assert RouterSettings().secret() is None
    with pytest.raises(ValueError, match="openssl"):
        build_app(RouterSettings(handle_key=SecretStr("short")))
    with pytest.raises(ValueError, match="not both"):
        RouterSettings(handle_key=SecretStr("k" * 16), handle_key_file=file).secret()


def test_secrets_do_not_show_in_the_settings() -> None:
    """Printing the settings gives no key away."""
    read = RouterSettings(
        handle_key=SecretStr("hidden-hidden-hidden"), upstream_api_key=SecretStr("hid")
    )
    assert "hid" not in repr(read).replace("handle", "")
