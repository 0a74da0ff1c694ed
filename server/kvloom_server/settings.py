"""The router's settings, read once: arguments first, then ``KVLOOM_…`` variables.

Nothing else of the server reads the environment.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvloom.protocol import CurveSide, curve_secret

MIN_KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Where one vLLM engine answers."""

    url: str
    """Its HTTP root, ``http://host:port``, without a slash at the end."""
    lease_address: str | None = None
    """Its lease service, ``tcp://host:port``, which also shows that its core is
    alive; ``None`` when it runs without kvloom's connector."""


def parse_engine(text: str) -> EngineSpec:
    """The engine in ``http://host:port`` or ``http://host:port,lease=tcp://…``.

    Raises:
        ValueError: the text has another form; the message shows the right one.
    """
    url, *options = text.strip().split(",")
    lease_address = None
    for option in options:
        name, _, value = option.partition("=")
        if name != "lease" or not _is_address(value, schemes=("tcp", "ipc")):
            raise ValueError(f"unknown engine option {option!r}: {_ENGINE_FORM}")
        lease_address = value
    if not _is_address(url, schemes=("http", "https")):
        raise ValueError(f"{url!r} is no engine's URL: {_ENGINE_FORM}")
    return EngineSpec(url=url.rstrip("/"), lease_address=lease_address)


_ENGINE_FORM: Final = "write http://host:port, with a lease service http://host:port,lease=tcp://host:port"


def _is_address(text: str, *, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in schemes and bool(parts.netloc or parts.path)


def _engines(value: object) -> object:
    """Engines out of one text (split at spaces) or a list of texts."""
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return items
    return tuple(parse_engine(i) if isinstance(i, str) else i for i in items)


Engines = Annotated[tuple[EngineSpec, ...], NoDecode, BeforeValidator(_engines)]


class RouterSettings(BaseSettings):
    """All that an operator can set. Times in seconds, sizes in bytes.

    ``KVLOOM_PREFILL`` and ``KVLOOM_DECODE`` take engines separated by spaces.

    Raises:
        pydantic.ValidationError: a value is out of range; it names the field.
    """

    model_config = SettingsConfigDict(env_prefix="KVLOOM_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    prefill: Engines = ()
    decode: Engines = ()
    connector: Literal["kvloom", "stock"] = "kvloom"
    """``stock``: the engines run vLLM's own connector, so nothing is returned."""
    returns: bool = True
    """Whether a turn's KV may go back to prefill (``on`` / ``off``)."""

    handle_key: SecretStr | None = None
    handle_key_file: Path | None = None
    """Seals the handles. Without either a key is made at each start: handles
    then do not survive a restart, the map rebuilt from the engines does. Give
    all replicas of a router the same key."""
    cluster_key_file: Path | None = None
    """File with the key that the engines' lease services ask for."""
    upstream_api_key: SecretStr | None = None
    """Sent to the engines as a bearer token. A client's own key never is."""

    body_limit_bytes: int = Field(default=32 * 1024 * 1024, ge=1)
    connect_timeout_s: float = Field(default=5.0, gt=0)
    idle_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of an engine inside one answer."""
    prefill_timeout_s: float = Field(default=120.0, gt=0)
    """Longest prefill leg; beyond it the turn goes on without that engine, and
    so do others for a while."""
    hang_after_s: float = Field(default=10.0, gt=0)
    """So long the core of an engine with a lease service may be silent before
    its work goes elsewhere."""
    handle_wait_s: float = Field(default=0.25, ge=0)
    """How long the end of an answer waits for its lease to be announced."""
    health_interval_s: float = Field(default=2.0, gt=0)
    health_timeout_s: float = Field(default=5.0, gt=0)
    shutdown_timeout_s: int = Field(default=30, ge=0)
    """How long open answers may go on after a stop was asked for."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["pairs", "json"] = "pairs"
    """One line an event: ``key=value`` pairs, or one JSON object."""
    traces: bool = False
    """Spans over OTLP, as the ``OTEL_…`` variables say; needs ``kvloom[otel]``."""
    max_conversations: int = Field(default=10_000, ge=1)
    conversation_idle_s: float = Field(default=3600.0, gt=0)
    """A conversation that has been silent for so long is forgotten."""

    def cluster_key(self) -> bytes | None:
        """The cluster key, or ``None`` where none is set.

        Raises:
            ClusterKeyError: it is too short.
            OSError: the file can't be read.
        """
        if self.cluster_key_file is None:
            return None
        key = self.cluster_key_file.read_bytes().strip()
        curve_secret(key, CurveSide.PEER)
        return key

    def secret(self) -> bytes | None:
        """The secret that seals handles, or ``None`` when none is set.

        Raises:
            ValueError: it is too short, or both sources are set.
            OSError: the file can't be read.
        """
        if self.handle_key is not None and self.handle_key_file is not None:
            raise ValueError("set handle_key or handle_key_file, not both")
        if self.handle_key is not None:
            secret = self.handle_key.get_secret_value().encode()
        elif self.handle_key_file is not None:
            secret = self.handle_key_file.read_bytes().strip()
        else:
            return None
        if len(secret) < MIN_KEY_BYTES:
            raise ValueError(
                f"the handle key has {len(secret)} bytes, at least {MIN_KEY_BYTES} "
                "are needed: make one with `openssl rand -hex 32`"
            )
        return secret
