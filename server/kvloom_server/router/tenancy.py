"""What keeps tenants apart inside engines: a salt in every prefix-cache key.

vLLM mixes ``cache_salt`` into its block hashes, and our connector into its
digests, so that neither a hit nor its timing tells one tenant what another
asked. Both legs carry the same salt. The nameless tenant of a router without
client keys has none of its own.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from .api import Body
from .errors import BadRequestError
from .request import TurnRequest

CACHE_SALT: Final = "cache_salt"
_SALT_BYTES: Final = 24


class Tenancy:
    """Salts turns. One a router."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """``secrets``: what seals handles; the last one counts here, so that
        replicas in the middle of a rotation agree, and caches stay warm until
        the old secret goes."""
        self.renew(secrets)

    def renew(self, secrets: Sequence[bytes]) -> None:
        """Other secrets, from now on."""
        secret = secrets[-1]
        self._key = hashlib.blake2b(secret, person=b"kvloom-salt").digest()

    def salted(self, request: TurnRequest, tenant: str) -> TurnRequest:
        """The request as its tenant's engines see it.

        A client's own salt goes into the tenant's: it parts more, never less.

        Raises:
            BadRequestError: the client's own salt is no text.
        """
        if not tenant:
            return request
        return replace(request, body=self._salted(request.body, tenant))

    def salted_json(self, body: bytes, tenant: str) -> bytes:
        """The same of a request that passes through; what is no JSON object has
        no salt, and stays.

        Raises:
            BadRequestError: the client's own salt is no text.
        """
        if not tenant or not body:
            return body
        try:
            values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            return body
        return msgspec.json.encode(self._salted(values, tenant))

    def _salted(self, body: Body, tenant: str) -> Body:
        own = _own_salt(body)
        digest = hashlib.blake2b(digest_size=_SALT_BYTES, key=self._key)
        for part in (tenant, own):
            encoded = part.encode(errors="surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        salt = msgspec.Raw(msgspec.json.encode(digest.hexdigest()))
        return {**body, CACHE_SALT: salt}


def _own_salt(body: Body) -> str:
    raw = body.get(CACHE_SALT)
    if raw is None:
        return ""
    try:
        return msgspec.json.decode(raw, type=str | None) or ""
    except (msgspec.DecodeError, RecursionError):
        raise BadRequestError(
            f"{CACHE_SALT} must be a text", code="invalid_field", param=CACHE_SALT
        ) from None
