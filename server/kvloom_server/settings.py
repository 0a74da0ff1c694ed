"""The router's settings, read once: arguments first, then ``KVLOOM_…`` variables,
then a file (``settings_file.py``).
"""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvloom.protocol import CurveSide, ReturnMode, curve_secret

from .addresses import DnsSpec, parse_member
from .addresses import EngineSpec as EngineSpec
from .addresses import parse_engine as parse_engine
from .keys import KeyFileError, handle_keys, read_handle_keys


def _engines(value: object) -> object:
    """Engines out of one text (split at spaces) or a list of texts."""
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return items
    return tuple(parse_member(i) if isinstance(i, str) else i for i in items)


Engines = Annotated[
    tuple[EngineSpec | DnsSpec, ...], NoDecode, BeforeValidator(_engines)
]


Returns = Literal["on", "off", "lazy", "eager", "auto"]
"""When a turn's KV goes back to prefill, as operators write it."""

Transfer = Literal["pull", "push"]
"""How decode learns that a prompt's KV is ready."""

ON: Final = ReturnMode.LAZY
"""What ``on`` stands for."""


def _returns(value: object) -> object:
    """``true``, ``1`` and their likes mean ``on``, as in every other variable."""
    text = str(value).strip().lower()
    if text in ("true", "1", "yes"):
        return "on"
    return "off" if text in ("false", "0", "no") else text


class RouterSettings(BaseSettings):
    """All that an operator can set. Times in seconds, sizes in bytes.

    ``KVLOOM_PREFILL`` and ``KVLOOM_DECODE`` take engines separated by spaces.

    Raises:
        pydantic.ValidationError: a value is out of range; it names the field.
    """

    model_config = SettingsConfigDict(env_prefix="KVLOOM_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Where the router listens."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    prefill: Engines = ()
    """Prefill engines: ``http://host:port,lease=tcp://host:port``; with ``,rank=N``
    one rank of a data-parallel server; ``dns+http://name:port,lease=port`` for all
    that a name resolves to. Several: the flag again, spaces in the variable, a
    list in the file."""
    decode: Engines = ()
    """Decode engines, likewise."""
    engines_file: Path | None = None
    """TOML with ``prefill = ["http://…", …]`` and ``decode = […]``, watched while
    the router runs; beside the engines above."""
    dns_interval_s: float = Field(default=5.0, gt=0)
    """How often the names of ``dns+http://`` engines are resolved."""
    file_interval_s: float = Field(default=0.5, gt=0)
    """How often the files that may change are looked at."""
    connector: Literal["kvloom", "stock"] = "kvloom"
    """``stock``: the engines run vLLM's own connector, so nothing is returned."""
    transfer: Transfer = "pull"
    """How decode learns that a prompt's KV is ready. ``pull``: from the router,
    after prefill has answered. ``push``: both legs go out at once, and prefill
    tells decode; needs our connector, and the lease services of both engines."""
    returns: Annotated[Returns, BeforeValidator(_returns)] = "on"
    """When a turn's KV goes back to prefill: ``off``; ``lazy``, with the next
    turn; ``eager``, while the tool runs; ``auto``, as the conversation's pauses
    say. ``on``: as this release likes, now ``lazy``."""
    direct_tokens: int = Field(default=512, ge=0)
    """New tokens up to which decode may do a turn alone, where it holds the
    history and an estimate says that it is faster. 0: never."""
    learn_threshold: bool = True
    """Whether pulls follow what was learned of their cost; else each engine's own
    ``kv_recompute_threshold`` holds."""
    token_exact: bool = False
    """Whether the next turn's history holds the tokens that were generated, where
    a client writes an answer's tool calls anew. Engines need
    ``--enable-scale-out``."""
    max_warm_ups: int = Field(default=4, ge=0)
    """Warm-ups of modes ``eager`` and ``auto`` at once; one a prefill engine."""

    handle_key: SecretStr | None = None
    """As ``handle_key_file``, the key itself; set one of them."""
    handle_key_file: Path | None = None
    """Seals the handles; a file holds one key a line: the first one seals, all of
    them open. Without either a key is made at each start: handles then do not
    survive a restart, the map rebuilt from the engines does. Give all replicas
    of a router the same keys."""
    cluster_name: str = ""
    """Goes into the seal: handles of a cluster with another name do not open."""
    cluster_key_file: Path | None = None
    """File with the key that the engines' lease services ask for; read at start."""
    upstream: Literal["native", "aiohttp"] = "native"
    """How engines are reached: by our own adapter on httptools, or by aiohttp's
    client, which takes several times the CPU."""
    upstream_api_key: SecretStr | None = None
    """Sent to the engines as a bearer token. A client's own key never is."""
    upstream_ca_file: Path | None = None
    """Certificates (PEM) that vouch for engines behind ``https://``."""
    # Of the key files those of handles, clients and admins are followed while the
    # router runs; the cluster key and certificates are read at start.
    tls_cert: Path | None = None
    """PEM; together with ``tls_key``: the router then speaks HTTPS."""
    tls_key: Path | None = None
    """PEM, the certificate's key."""

    client_keys_file: Path | None = None
    """TOML, ``tenant = "key"``: who may use the models. Each tenant has its own
    conversations, handles and prefix caches. Without it everybody may, as one
    nameless tenant."""
    admin_keys_file: Path | None = None
    """TOML, ``name = "key"``: who may use ``/kvloom/``. Without it, whoever
    reaches a router that listens on loopback only, and nobody elsewhere."""
    open_metrics: bool = True
    """Whether ``/metrics`` needs no key; else an admin's."""

    derive_conversations: bool = True
    """Whether requests that name no conversation get one by their messages."""
    body_limit_bytes: int = Field(default=32 * 1024 * 1024, ge=1)
    """Longest body of a request; a longer one is a 413."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """How long connecting to an engine may take."""
    idle_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of an engine inside one answer."""
    client_idle_timeout_s: float = Field(default=300.0, gt=0)
    """How long a client may take nothing of its answer, or send nothing of its
    request."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest request, from its arrival to the end of its answer."""
    prefill_timeout_s: float = Field(default=120.0, gt=0)
    """Longest prefill leg; beyond it the turn goes on without that engine, and
    so do others for a while."""
    hang_after_s: float = Field(default=10.0, gt=0)
    """So long the core of an engine with a lease service may be silent before
    its work goes elsewhere."""
    max_turns_per_engine: int | None = Field(default=None, ge=1)
    """Turns that one engine works at; more wait in line."""
    max_waiting: int = Field(default=1000, ge=0)
    """Turns that wait in line; more are told to come back later."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """How long a turn waits in line."""
    failures_to_rest: int = Field(default=5, ge=1)
    """After so many failures in a row an engine gets no work for a while."""
    min_engine_share: float = Field(default=0.5, ge=0, le=1)
    """So many of the engines get work however often they fail."""
    handle_wait_s: float = Field(default=0.25, ge=0)
    """How long the end of an answer waits for its lease to be announced."""
    health_interval_s: float = Field(default=2.0, gt=0)
    """How often engines are asked how they are."""
    health_timeout_s: float = Field(default=5.0, gt=0)
    """How long they may take to say so."""
    shutdown_timeout_s: int = Field(default=30, ge=0)
    """How long open answers may go on after a stop was asked for."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below it are left out."""
    log_format: Literal["pairs", "json"] = "pairs"
    """One line an event: ``key=value`` pairs, or one JSON object."""
    traces: bool = False
    """Spans over OTLP (HTTP, protobuf only), as the ``OTEL_…`` variables say; needs
    ``kvloom[otel]``."""
    max_conversations: int = Field(default=10_000, ge=1)
    """Conversations that are remembered; those that were silent longest go first."""
    max_map_bytes: int = Field(default=32 * 1024 * 1024, ge=64 * 1024)
    """Memory for what is remembered of conversations."""
    conversation_idle_s: float = Field(default=3600.0, gt=0)
    """A conversation that has been silent for so long is forgotten."""

    @property
    def return_mode(self) -> ReturnMode:
        """The mode of turns whose request names none."""
        return ON if self.returns == "on" else ReturnMode(self.returns)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both, or none")
        if self.transfer == "push":
            self._check_push()
        return self

    def _check_push(self) -> None:
        if self.connector != "kvloom":
            raise ValueError(
                "transfer=push needs kvloom's connector: vLLM's own can't tell decode "
                "that a prompt is ready; use transfer=pull"
            )
        engines = [
            e for e in (*self.prefill, *self.decode) if isinstance(e, EngineSpec)
        ]
        silent = [engine.url for engine in engines if engine.lease_address is None]
        if silent:
            raise ValueError(
                "transfer=push needs the lease service of every engine, by which "
                f"prefill tells decode: write {silent[0]},lease=tcp://host:port"
            )

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

    def secrets(self) -> list[bytes]:
        """The secrets that seal handles, the current one first; none are set by
        default.

        Raises:
            KeyFileError: one is too short, both sources are set, or the file
                can't be read.
        """
        if self.handle_key is not None and self.handle_key_file is not None:
            raise KeyFileError("set handle_key or handle_key_file, not both")
        if self.handle_key is not None:
            text = self.handle_key.get_secret_value().encode()
            return handle_keys(text, source="KVLOOM_HANDLE_KEY")
        if self.handle_key_file is not None:
            return read_handle_keys(self.handle_key_file)
        return []
