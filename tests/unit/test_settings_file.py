"""Settings in a file: an operator keeps them beside the deployment."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvloom_server.settings_file import SettingsFileError, settings_with


def written(folder: Path, text: str) -> Path:
    file = folder / "kvloom.toml"
    file.write_text(text)
    return file


def test_any_setting_may_stand_in_the_file(tmp_path):
    """Engines too, as a list."""
    file = written(
        tmp_path,
        'port = 8123\nreturns = "eager"\ndecode = ["http://d:1,lease=tcp://d:2"]\n',
    )
    settings = settings_with({}, file, {})
    assert (settings.port, settings.returns) == (8123, "eager")
    [engine] = settings.decode
    assert engine.url == "http://d:1"


def test_arguments_win_then_variables_then_the_file(tmp_path, monkeypatch):
    """So that one run can differ from what is written."""
    file = written(tmp_path, 'port = 1\nhost = "::1"\nreturns = "off"\n')
    for name, value in {"KVLOOM_PORT": "2", "KVLOOM_HOST": "127.0.0.2"}.items():
        monkeypatch.setenv(name, value)
    environment = {"KVLOOM_PORT": "2", "kvloom_host": "127.0.0.2"}
    settings = settings_with({"port": 3, "host": None}, file, environment)
    assert settings.port == 3
    assert settings.host == "127.0.0.2"
    assert settings.returns == "off"


def test_a_name_that_is_no_setting_is_refused(tmp_path):
    """A typo would otherwise pass for the default."""
    with pytest.raises(SettingsFileError, match="retruns"):
        settings_with({}, written(tmp_path, 'retruns = "off"'), {})


@pytest.mark.parametrize("text", ["port =", "port = 1\nport = 2", "[port"])
def test_what_is_no_toml_is_said(tmp_path, text):
    """With the place."""
    with pytest.raises(SettingsFileError, match=r"is no TOML: .* \(at "):
        settings_with({}, written(tmp_path, text), {})


def test_a_file_that_is_not_there_is_said(tmp_path):
    """Not taken for an empty one."""
    with pytest.raises(SettingsFileError, match=r"kvloom\.toml can't be read: No such"):
        settings_with({}, tmp_path / "kvloom.toml", {})


def test_what_is_wrong_in_the_file_is_said_with_its_name(tmp_path: Path) -> None:
    """So that nobody looks for it among the flags."""
    file = tmp_path / "router.toml"
    file.write_text('port = "many"\n')
    with pytest.raises(SettingsFileError, match=r"router\.toml: port: "):
        settings_with({}, file, {})
    with pytest.raises(ValidationError):  # the file's own is not used
        settings_with({"port": "few"}, file, {})
