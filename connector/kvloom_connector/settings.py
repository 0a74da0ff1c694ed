"""The connector's settings, read once from ``kv_connector_extra_config``.

Names are upstream's where upstream has the setting.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from kvloom.protocol import ClusterKeyError, CurveSide, curve_secret

# Read by vLLM's own NIXL classes, under the same names.
UPSTREAM_KEYS: Final = frozenset(
    {
        "backends",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_lease_duration",
        "num_threads",
    }
)

MAX_LEASE_TTL_S: Final = 7 * 86_400.0
"""The longest lease, granted or renewed."""
MAX_CLAIM_LIFETIME_S: Final = 3600.0
"""The longest that a reader may keep a lease from ending."""


class SettingsError(ValueError):
    """``kv_connector_extra_config`` holds something that can't be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """Everything that can be set on an engine."""

    bidirectional_kv_xfer: bool = True
    """Returns on; off is plain one-way transfer."""
    decoder_kv_blocks_ttl: float = 480.0
    """How long decode keeps a turn's blocks for the next turn, seconds."""
    kv_recompute_threshold: int = 64
    """Prefill computes fewer tokens than this, and does not pull them."""
    handover_recompute_threshold: int = 0
    """Decode computes fewer tokens than this, and does not pull them from
    prefill; 0 pulls any."""
    lease_host: str = "127.0.0.1"
    """Where the engine's lease service listens (prefill's, too)."""
    lease_port: int = 0
    """0: the side channel's port + 1000. Of a data-parallel server the first rank's;
    each next rank listens one port above."""
    cluster_key_file: str = ""
    """File with the key that prefill, decode and router share; the lease services
    then speak CURVE and let in nobody else. Empty: no key."""
    claim_timeout_s: float = 0.25
    """How long prefill waits for an answer before it computes locally."""
    claim_lifetime_s: float = 10.0
    """How long decode honours a claim that nobody releases. A read that takes
    longer fails, and its prompt is computed."""
    max_leased_fraction: float = 0.5
    """Of decode's blocks, what leases may hold at most."""
    nixl_progress_delay_us: int | None = None
    """Pause of NIXL's progress thread; ``None``: 1000 on CPU, where it would
    take a core from the model, and NIXL's own elsewhere."""

    @classmethod
    def of_extra_config(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Parse what the operator wrote.

        Raises:
            SettingsError: an unknown key, a wrong type or a value out of range.
        """
        known = {f.name: f.default for f in fields(cls)}
        unknown = sorted(set(extra) - set(known) - UPSTREAM_KEYS)
        if unknown:
            raise SettingsError(
                f"unknown keys in kv_connector_extra_config: {', '.join(unknown)}; "
                f"kvloom knows {', '.join(sorted(known))}"
            )
        settings = cls(
            **{
                name: _typed(name, value, known[name])
                for name, value in extra.items()
                if name in known
            }
        )
        settings._check()
        return settings

    def at_rank(self, rank: int) -> "ConnectorSettings":
        """The settings of one data-parallel rank, which share what was written.

        Raises:
            SettingsError: there is no such port.
        """
        if not self.lease_port:
            # The side channel's port counts the ranks already.
            return self
        own = replace(self, lease_port=self.lease_port + rank)
        own._check()
        return own

    def cluster_key(self) -> bytes | None:
        """The cluster key, or ``None`` where none is configured.

        Raises:
            SettingsError: the file can't be read, or the key is too short.
        """
        if not self.cluster_key_file:
            return None
        try:
            key = Path(self.cluster_key_file).read_bytes().strip()
            curve_secret(key, CurveSide.SERVICE)
        except (OSError, ClusterKeyError) as error:
            raise SettingsError(f"cluster_key_file: {error}") from error
        return key

    @property
    def lets_in_everybody(self) -> bool:
        """Whether other machines reach the lease service without a key."""
        if self.cluster_key_file or self.lease_host == "localhost":
            return False
        try:
            return not ip_address(self.lease_host).is_loopback
        except ValueError:
            return True

    def _check(self) -> None:
        for name, is_ok, rule in self._rules():
            if not is_ok:
                raise SettingsError(
                    f"{name}={getattr(self, name)!r} is out of range: it must be {rule}"
                )

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        ttl, lifetime = self.decoder_kv_blocks_ttl, self.claim_lifetime_s
        yield (
            "decoder_kv_blocks_ttl",
            0 < ttl <= MAX_LEASE_TTL_S,
            f"more than 0 and at most {MAX_LEASE_TTL_S:.0f} seconds",
        )
        yield (
            "kv_recompute_threshold",
            self.kv_recompute_threshold >= 0,
            "0 tokens or more",
        )
        yield (
            "handover_recompute_threshold",
            self.handover_recompute_threshold >= 0,
            "0 tokens or more",
        )
        yield "lease_host", bool(self.lease_host), "a host name or address"
        yield "lease_port", 0 <= self.lease_port <= 65535, "from 0 to 65535"
        yield (
            "claim_timeout_s",
            0 < self.claim_timeout_s <= 60,
            "more than 0 and at most 60 seconds",
        )
        yield (
            # A claim of which more than half is over is not used any more.
            "claim_lifetime_s",
            2 * self.claim_timeout_s < lifetime <= MAX_CLAIM_LIFETIME_S,
            f"more than twice claim_timeout_s ({self.claim_timeout_s}) and at most "
            f"{MAX_CLAIM_LIFETIME_S:.0f} seconds",
        )
        yield "max_leased_fraction", 0 <= self.max_leased_fraction <= 1, "from 0 to 1"
        yield (
            "nixl_progress_delay_us",
            0 <= (self.nixl_progress_delay_us or 0) <= 1_000_000,
            "from 0 to 1000000 microseconds",
        )


def _typed(name: str, value: object, default: object) -> Any:
    """``value`` in the type of ``default``; ints pass for floats."""
    want = int if default is None else type(default)
    if want is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value)
    if type(value) is want or (default is None and value is None):
        return value
    raise SettingsError(f"{name} must be {want.__name__}, not {value!r}")


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


LEASE_PORT_OFFSET: Final = 1000


def service_port(settings: ConnectorSettings, side_port: int) -> int:
    """Where an engine's lease service listens, beside NIXL's side channel."""
    return settings.lease_port or side_port + LEASE_PORT_OFFSET
