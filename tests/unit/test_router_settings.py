"""What an operator can set, and what is refused at start."""

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from kvloom_server.addresses import DnsSpec, EngineSpec, parse_engine, parse_member
from kvloom_server.keys import KeyFileError
from kvloom_server.router import build_app
from kvloom_server.settings import RouterSettings


def test_an_engine_is_its_url_and_its_lease_service() -> None:
    """Engines are given as one word each."""
    assert parse_engine("http://h:1/") == EngineSpec(url="http://h:1")
    assert parse_engine("http://h:1,lease=tcp://h:2") == EngineSpec(
        url="http://h:1", lease_address="tcp://h:2"
    )
    assert parse_engine("http://h:1,rank=3").rank == 3


def test_a_name_stands_for_all_its_engines() -> None:
    """One word for a service whose engines come and go."""
    spec = parse_member("dns+http://engines.local:8000,lease=6600")
    assert spec == DnsSpec(host="engines.local", port=8000, lease_port=6600)
    assert isinstance(spec, DnsSpec)
    assert spec.at("10.0.0.1") == EngineSpec(
        url="http://10.0.0.1:8000", lease_address="tcp://10.0.0.1:6600"
    )
    assert spec.at("fd00::1").url == "http://[fd00::1]:8000"


@pytest.mark.parametrize(
    "text",
    [
        "dns+http://name",
        "dns+https://name:1",
        "dns+http://name:1,lease=tcp://h:2",
        "dns+http://name:1,rank=0",
        "dns+http://name:99999",
    ],
)
def test_another_form_of_name_is_refused_with_the_right_one(text: str) -> None:
    """A mistyped name stops the start and shows how it is written."""
    with pytest.raises(ValueError, match="write dns"):
        parse_member(text)


def test_the_ranks_of_one_server_are_different_engines() -> None:
    """They share a URL and nothing else: no handle of one opens at the other."""
    first, second = (parse_engine(f"http://h:1,rank={rank}") for rank in (0, 1))
    assert first.identity != second.identity
    with pytest.raises(ValueError, match="rank"):
        parse_engine("http://h:1,rank=-1")


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
    assert RouterSettings(handle_key_file=file).secrets() == [file.read_bytes().strip()]
    assert RouterSettings().secrets() == []
    with pytest.raises(KeyFileError, match="openssl"):
        build_app(RouterSettings(handle_key=SecretStr("short")))
    with pytest.raises(KeyFileError, match="not both"):
        RouterSettings(handle_key=SecretStr("k" * 16), handle_key_file=file).secrets()


def test_a_file_of_handle_keys_has_one_a_line(tmp_path: Path) -> None:
    """A rotation is one new line on top of the file."""
    file = tmp_path / "keys"
    file.write_text(f"\n{'new' * 8}\r\n\n  {'old' * 8}\n")
    read = RouterSettings(handle_key_file=file).secrets()
    assert read == [b"new" * 8, b"old" * 8]
    file.write_text(f"{'new' * 8}\nshort\n")
    with pytest.raises(KeyFileError, match="5 bytes"):
        RouterSettings(handle_key_file=file).secrets()
    for nothing in (tmp_path / "none", tmp_path):
        with pytest.raises(KeyFileError, match="can't be read"):
            RouterSettings(handle_key_file=nothing).secrets()


def test_one_half_of_a_certificate_is_refused() -> None:
    """A router that was to speak HTTPS does not come up without."""
    with pytest.raises(ValidationError, match="tls_cert and tls_key"):
        RouterSettings(tls_cert=Path("cert.pem"))


def test_secrets_do_not_show_in_the_settings() -> None:
    """Printing the settings gives no key away."""
    read = RouterSettings(
        handle_key=SecretStr("hidden-hidden-hidden"), upstream_api_key=SecretStr("hid")
    )
    assert "hid" not in repr(read).replace("handle", "")


def test_push_is_refused_where_prefill_cannot_tell_decode() -> None:
    """The start fails with a sentence that says why."""
    leased = EngineSpec(url="http://h:1", lease_address="tcp://h:2")
    mute = EngineSpec(url="http://h:3")
    assert RouterSettings(transfer="push", prefill=(leased,), decode=(leased,))
    with pytest.raises(ValidationError, match="http://h:3,lease="):
        RouterSettings(transfer="push", prefill=(leased,), decode=(mute,))
    with pytest.raises(ValidationError, match="needs kvloom's connector"):
        RouterSettings(transfer="push", connector="stock")
