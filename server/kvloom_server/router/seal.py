"""Sealed handles: what the client carries, and only this router can open.

A handle is ``kvl1.`` and the base64url of key id, nonce and AES-GCM text, of
constant length. Whatever does not open is a miss with a reason, never an
error: the turn goes on without it.
"""

import base64
import binascii
import hashlib
import secrets
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .identity import LEASE_ID_BYTES, TAG_BYTES, short_digest

_PREFIX: Final = "kvl1."
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_INSIDE: Final = struct.Struct(f"<{LEASE_ID_BYTES}s8sdI{TAG_BYTES}s8s8s")
"""Lease, engine, deadline, tokens, conversation, model, tenant."""
_SEALED_BYTES: Final = 1 + _NONCE_BYTES + _INSIDE.size + _TAG_BYTES


class HandleMiss(StrEnum):
    """Why a handle is of no use; the label of a metric."""

    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    """Sealed by another cluster, or before this router's key was made."""
    FORGED = "forged"
    EXPIRED = "expired"
    OTHER_CONVERSATION = "other_conversation"
    OTHER_MODEL = "other_model"
    OTHER_TENANT = "other_tenant"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a handle is for. One that is used for another is a miss."""

    conversation: bytes
    """The conversation's tag."""
    model: str
    tenant: str = ""


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """What is inside a handle."""

    lease_id: str
    engine: bytes
    """``short_digest`` of the decode engine's URL."""
    num_tokens: int
    deadline_unix: float


class Sealer:
    """Seals with the first secret, opens with any of them (for rotation)."""

    def __init__(self, secrets_: Sequence[bytes], *, cluster: str = "") -> None:
        """``secrets_`` may have any length; all bytes of each count. Handles of
        another ``cluster`` do not open, whatever its secrets.

        Raises:
            ValueError: there is no secret.
        """
        self._cluster = cluster
        self.renew(secrets_)

    def renew(self, secrets_: Sequence[bytes]) -> None:
        """Other secrets, from now on; handles under none of them are misses.

        Raises:
            ValueError: there is no secret.
        """
        if not secrets_:
            raise ValueError("a sealer needs at least one secret")
        derived = [_derived(secret, self._cluster) for secret in secrets_]
        self._current = derived[0][0]
        # The first secret wins when two have the same key id.
        self._ciphers = {key[0]: AESGCM(key[1:]) for key in reversed(derived)}

    @classmethod
    def with_random_key(cls) -> "Sealer":
        """A sealer whose handles do not survive this process."""
        return cls([secrets.token_bytes(32)])

    def seal(self, inside: Sealed, binding: Binding) -> str:
        """The handle of a lease, 132 characters long."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        text = self._ciphers[self._current].encrypt(
            nonce, _packed(inside, binding), _PREFIX.encode()
        )
        sealed = bytes([self._current]) + nonce + text
        return _PREFIX + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def open(self, handle: str, binding: Binding, now: float) -> Sealed | HandleMiss:
        """What is inside, if it is ours, whole, fresh and for ``binding``."""
        sealed = _unwrapped(handle)
        if sealed is None:
            return HandleMiss.MALFORMED
        cipher = self._ciphers.get(sealed[0])
        if cipher is None:
            return HandleMiss.UNKNOWN_KEY
        nonce, text = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            inside = cipher.decrypt(nonce, text, _PREFIX.encode())
        except InvalidTag:
            return HandleMiss.FORGED
        return _checked(inside, binding, now)


def _derived(secret: bytes, cluster: str) -> bytes:
    """One byte of key id, and a key of AES-256."""
    name = cluster.encode(errors="surrogatepass")
    digest = hashlib.blake2b(digest_size=33, person=b"kvloom-seal")
    digest.update(len(name).to_bytes(8, "little") + name + secret)
    return digest.digest()


def _packed(inside: Sealed, binding: Binding) -> bytes:
    return _INSIDE.pack(
        bytes.fromhex(inside.lease_id),
        inside.engine,
        inside.deadline_unix,
        min(inside.num_tokens, 2**32 - 1),
        binding.conversation,
        short_digest(binding.model),
        short_digest(binding.tenant),
    )


def _unwrapped(handle: str) -> bytes | None:
    text = handle.removeprefix(_PREFIX)
    try:
        sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return None
    return sealed if len(sealed) == _SEALED_BYTES else None


def _checked(packed: bytes, binding: Binding, now: float) -> Sealed | HandleMiss:
    lease_id, engine, deadline, num_tokens, *bound = _INSIDE.unpack(packed)
    wanted = (
        (binding.conversation, HandleMiss.OTHER_CONVERSATION),
        (short_digest(binding.model), HandleMiss.OTHER_MODEL),
        (short_digest(binding.tenant), HandleMiss.OTHER_TENANT),
    )
    for (expected, miss), found in zip(reversed(wanted), reversed(bound), strict=True):
        if found != expected:
            return miss
    if deadline <= now:
        return HandleMiss.EXPIRED
    return Sealed(
        lease_id=lease_id.hex(),
        engine=engine,
        num_tokens=num_tokens,
        deadline_unix=deadline,
    )
