"""Secrets that operators keep in files: what seals handles, what opens the API."""

import hashlib
import tomllib
from pathlib import Path
from typing import Any, Final

MIN_KEY_BYTES: Final = 16
_HASHED: Final = "sha256:"
_DIGEST_HEX: Final = 64


class KeyFileError(ValueError):
    """A key, or the file that holds keys, is of no use; the message says why,
    and never shows a key."""


def handle_keys(text: bytes, *, source: str) -> list[bytes]:
    """The secrets in ``text``, one a line; the first one seals, all of them open.

    Args:
        text: empty lines are skipped.
        source: where it comes from, for the message.

    Raises:
        KeyFileError: there is none, or one is too short.
    """
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise KeyFileError(f"{source} is empty: {_MAKE_ONE}")
    for key in keys:
        if len(key) < MIN_KEY_BYTES:
            raise KeyFileError(
                f"a key in {source} has {len(key)} bytes, at least {MIN_KEY_BYTES} "
                f"are needed: {_MAKE_ONE}"
            )
    return keys


def read_handle_keys(path: Path) -> list[bytes]:
    """The secrets in a file; see :func:`handle_keys`.

    Raises:
        KeyFileError: as there, or the file can't be read.
    """
    return handle_keys(_read(path), source=str(path))


def read_api_keys(path: Path) -> dict[bytes, str]:
    """Who may come in: the SHA-256 of each key, and whose it is.

    The file is TOML: ``name = "key"``, or a list of keys while one replaces
    another; ``"sha256:…"`` (64 hexadecimal digits) stands for a key that the file
    does not tell.

    Raises:
        KeyFileError: the file can't be read, or has another form.
    """
    return parse_api_keys(_read(path), path=path)


def parse_api_keys(text: bytes, *, path: Path) -> dict[bytes, str]:
    """The same of a file's text; ``path`` is for messages.

    Raises:
        KeyFileError: it has another form.
    """
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # The error of a TOML parser names a place; a value is not in it.
        raise KeyFileError(f"{path} is no TOML: {_place(error)}") from None
    names: dict[bytes, str] = {}
    for name, keys in table.items():
        if not name:
            raise KeyFileError(f"{path}: a key belongs to somebody without a name")
        for key in _texts(keys, path=path, name=name):
            digest = _digest(key, path=path, name=name)
            if names.setdefault(digest, name) != name:
                raise KeyFileError(
                    f"{path}: {names[digest]} and {name} have the same key"
                )
    if not names:
        raise KeyFileError(f'{path} names nobody: write lines like name = "key"')
    return names


def api_key_digest(key: str) -> bytes:
    """What a key is compared by."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _texts(keys: Any, *, path: Path, name: str) -> list[str]:
    listed = keys if isinstance(keys, list) else [keys]
    if not listed or not all(isinstance(key, str) for key in listed):
        raise KeyFileError(f'{path}: {name} must be a key, or ["old key", "new key"]')
    return listed


def _digest(key: str, *, path: Path, name: str) -> bytes:
    if not key.startswith(_HASHED):
        if len(key.encode()) < MIN_KEY_BYTES:
            raise KeyFileError(
                f"{path}: the key of {name} has less than {MIN_KEY_BYTES} bytes: "
                f"{_MAKE_ONE}"
            )
        return api_key_digest(key)
    digits = key.removeprefix(_HASHED)
    try:
        if len(digits) != _DIGEST_HEX:
            raise ValueError
        return bytes.fromhex(digits)
    except ValueError:
        raise KeyFileError(
            f"{path}: what follows sha256: of {name} must be {_DIGEST_HEX} "
            "hexadecimal digits"
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(
            f"the key file {path} can't be read ({error.strerror})"
        ) from error


def _place(error: ValueError) -> str:
    text = str(error)
    at = text.rfind("(at ")
    return text[at + 1 :].rstrip(")") if at >= 0 else "it can't be read"


_MAKE_ONE: Final = "make one with `openssl rand -hex 32`"
