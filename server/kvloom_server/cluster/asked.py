"""What ``kvloom up`` is asked for."""

from dataclasses import dataclass
from pathlib import Path

from kvloom_server.settings import Returns, Transfer

from .engine_args import Connector, PassedThrough


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(PassedThrough):
    """What ``kvloom up`` is asked for."""

    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    model: str | None = None
    """A hub id or a folder; ``None``: the bundled model."""
    returns: Returns = "on"
    """When a turn's KV goes back to prefill."""
    transfer: Transfer = "pull"
    """How decode learns that a prompt's KV is ready."""
    direct_tokens: int | None = None
    """As in the router's settings; ``None`` leaves it to them."""
    connector: Connector = Connector.KVLOOM
    has_dev_endpoints: bool = False
    cluster_key_file: Path | None = None
    """File with the key that engines and router share; ``None``: no key."""
    is_open: bool = True
    """Whether whoever reaches the router may use it; else those whom the key files
    of the variables name."""
    log_dir: Path | None = None
    """``None``: a temporary folder that stays, because its logs explain."""
    start_timeout_s: float = 900.0

    @property
    def is_returning(self) -> bool:
        return self.returns != "off"
