"""Who may do what: clients use the models, admins ``/kvloom/``. Pure.

Without client keys everybody is one nameless tenant. Without admin keys the admin
API is for those who reach a router that listens on loopback only, and a web page
that some browser there has open is not among them.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from kvloom_server.keys import api_key_digest

from .errors import RouterError

ADMIN_PATHS: Final = "/kvloom/"
CONVERSATION_PATHS: Final = "/kvloom/conversations/"
METRICS_PATH: Final = "/metrics"
OPEN_PATHS: Final = frozenset({"/health", "/kvloom", "/kvloom/"})
"""Need no key: they say nothing of anybody (the page's data is elsewhere)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who a request comes from."""

    tenant: str = ""
    is_admin: bool = False


class KeyRing:
    """Keys by name; asking for one takes equally long, whatever is asked."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """``names``: whose key it is, by the key's SHA-256."""
        self.renew(names)

    def renew(self, names: Mapping[bytes, str]) -> None:
        """Other keys, from now on."""
        # Looked up by a digest under a key that nobody knows, so that the time
        # of a miss says nothing about the keys that are there.
        self._blind = secrets.token_bytes(32)
        self._names = {self._blinded(d): (d, n) for d, n in names.items()}

    def name_of(self, key: str) -> str | None:
        """Whose key this is."""
        digest = api_key_digest(key)
        kept, name = self._names.get(self._blinded(digest), (b"", ""))
        return name if hmac.compare_digest(kept, digest) else None

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._blind, digest_size=32).digest()


class Access:
    """Lets requests in. One a router."""

    def __init__(
        self,
        *,
        clients: KeyRing | None,
        admins: KeyRing | None,
        is_local: bool,
        has_open_metrics: bool,
    ) -> None:
        """``is_local``: the router listens on loopback only."""
        self._clients = clients
        self._admins = admins
        self._is_local = is_local
        self._has_open_metrics = has_open_metrics

    def admit(self, path: str, headers: Mapping[str, str]) -> Caller:
        """Who asks for ``path``, who may.

        Args:
            path: of the request, without a query.
            headers: lower-case names.

        Raises:
            RouterError: 401 or 403.
        """
        if path in OPEN_PATHS or (path == METRICS_PATH and self._has_open_metrics):
            return Caller()
        if path.startswith(CONVERSATION_PATHS):
            return self._owner(headers)
        if path.startswith(ADMIN_PATHS) or path == METRICS_PATH:
            return self._admin(headers)
        return self._client(headers)

    def _client(self, headers: Mapping[str, str]) -> Caller:
        if self._clients is None:
            return Caller()
        name = self._clients.name_of(_key_in(headers))
        if name is None:
            raise _unknown_key("A client's key", headers)
        return Caller(tenant=name)

    def _owner(self, headers: Mapping[str, str]) -> Caller:
        """A conversation's own client, or an admin."""
        if self._is_admins(headers):
            return Caller(is_admin=True)
        return self._client(headers)

    def _admin(self, headers: Mapping[str, str]) -> Caller:
        if self._admins is None:
            self._check_local(headers)
        elif not self._is_admins(headers):
            raise _unknown_key("An admin's key", headers)
        return Caller(is_admin=True)

    def _is_admins(self, headers: Mapping[str, str]) -> bool:
        return self._admins is not None and (
            self._admins.name_of(_key_in(headers)) is not None
        )

    def _check_local(self, headers: Mapping[str, str]) -> None:
        origin = headers.get("origin")
        host = headers.get("host", "")
        # A page's script can reach loopback, under its own name or another's.
        is_page = origin is not None and _site_of(origin) != host
        if not self._is_local or is_page or not is_loopback(_host_in(host)):
            raise RouterError(
                "Without admin keys this is for requests over loopback to a router "
                "that listens there only: set KVLOOM_ADMIN_KEYS_FILE",
                status=403,
                kind="permission_error",
                code="admin_keys_needed",
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _site_of(origin: str) -> str:
    """The host and port of an ``Origin``; empty where it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_in(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _key_in(headers: Mapping[str, str]) -> str:
    """The key in ``Authorization: Bearer``, or where Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def _unknown_key(whose: str, headers: Mapping[str, str]) -> RouterError:
    how = "send it as `Authorization: Bearer …`"
    if _key_in(headers):
        how = "the one that was sent is none"
    return RouterError(
        f"{whose} is needed here: {how}",
        status=401,
        kind="invalid_request_error",
        code="invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )
