"""How an engine is written: one word, in flags, variables, files and requests.

``http://host:port``, with options after commas; ``dns+http://name:port`` stands
for every address that the name resolves to.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

_FORM: Final = (
    "write http://host:port, with a lease service "
    "http://host:port,lease=tcp://host:port"
)
_DNS_FORM: Final = (
    "write dns+http://name:port, with lease services dns+http://name:port,lease=port"
)
_DNS: Final = "dns+"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Where one vLLM engine answers."""

    url: str
    """Its HTTP root, ``http://host:port``, without a slash at the end."""
    lease_address: str | None = None
    """Its lease service, ``tcp://host:port``, which also shows that its core is
    alive; ``None`` when it runs without kvloom's connector."""
    rank: int | None = None
    """One rank of a data-parallel server: an engine of its own, with its own
    cache and lease service, behind a URL that its siblings share."""

    @property
    def identity(self) -> str:
        """What tells it from other engines, at every start of either side."""
        return self.url if self.rank is None else f"{self.url}#{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSpec:
    """A name that resolves to engines, one an address, on the same ports."""

    host: str
    port: int
    lease_port: int | None = None

    def at(self, address: str) -> EngineSpec:
        """The engine at one of the name's addresses (IPv4 or IPv6)."""
        host = f"[{address}]" if ":" in address else address
        lease = None if self.lease_port is None else f"tcp://{host}:{self.lease_port}"
        return EngineSpec(url=f"http://{host}:{self.port}", lease_address=lease)


def parse_engine(text: str) -> EngineSpec:
    """The engine in ``http://host:port[,lease=tcp://host:port][,rank=number]``.

    Raises:
        ValueError: the text has another form; the message shows the right one.
    """
    url, options = _split(text)
    if _parts(url, schemes=("http", "https")) is None:
        raise ValueError(f"{url!r} is no engine's URL: {_FORM}")
    lease, rank = options.pop("lease", None), options.pop("rank", None)
    if options:
        raise ValueError(f"unknown engine option {next(iter(options))!r}: {_FORM}")
    if lease is not None and _parts(lease, schemes=("tcp", "ipc")) is None:
        raise ValueError(f"{lease!r} is no lease service: {_FORM}")
    if rank is not None and not _is_number(rank, below=1 << 16):
        raise ValueError(f"{rank!r} is no data-parallel rank: write rank=0, rank=1, …")
    return EngineSpec(
        url=url.rstrip("/"),
        lease_address=lease,
        rank=None if rank is None else int(rank),
    )


def parse_member(text: str) -> EngineSpec | DnsSpec:
    """An engine, or a name that resolves to engines.

    Raises:
        ValueError: the text has another form; the message shows the right one.
    """
    if not text.strip().startswith(_DNS):
        return parse_engine(text)
    url, options = _split(text)
    parts = _parts(url.removeprefix(_DNS), schemes=("http",))
    if parts is None or not parts.hostname or not parts.port or parts.path.strip("/"):
        raise ValueError(f"{url!r} names no engines: {_DNS_FORM}")
    lease = options.pop("lease", None)
    if options or (lease is not None and not _is_number(lease, below=1 << 16)):
        raise ValueError(f"{text.strip()!r} has other options: {_DNS_FORM}")
    return DnsSpec(
        host=parts.hostname,
        port=parts.port,
        lease_port=None if lease is None else int(lease),
    )


def _split(text: str) -> tuple[str, dict[str, str]]:
    """The URL, and the options by name."""
    url, *options = text.strip().split(",")
    pairs = (option.partition("=") for option in options)
    return url, {name.strip(): value.strip() for name, _, value in pairs}


def _parts(text: str, *, schemes: tuple[str, ...]) -> SplitResult | None:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises when it is none
    except ValueError:
        return None
    is_whole = parts.scheme in schemes and bool(parts.netloc or parts.path)
    return parts if is_whole else None


def _is_number(text: str, *, below: int) -> bool:
    return text.isascii() and text.isdecimal() and int(text) < below
