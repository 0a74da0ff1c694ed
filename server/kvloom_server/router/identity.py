"""Names inside the router: conversation tags, turn ids, engine marks.

A turn id is the name of the lease that decode grants at the turn's end. Its
first half is the conversation's tag, so that the whole map can be rebuilt from
the engines' own list of leases after a restart.
"""

import hashlib
import secrets
from typing import Final

TAG_BYTES: Final = 8
LEASE_ID_BYTES: Final = 16


def conversation_tag(*, tenant: str, model: str, conversation: str) -> bytes:
    """The 8 bytes that stand for one tenant's conversation with one model."""
    return _digest(b"kvloom-tag", tenant, model, conversation, size=TAG_BYTES)


def short_digest(text: str) -> bytes:
    """8 bytes that stand for an engine's URL, a model or a tenant."""
    return _digest(b"kvloom-name", text, size=TAG_BYTES)


def new_turn_id(tag: bytes | None) -> str:
    """A fresh turn id, 32 hexadecimal digits.

    Args:
        tag: of the turn's conversation; ``None`` makes a name that belongs to
            none.
    """
    own = tag if tag is not None else secrets.token_bytes(TAG_BYTES)
    return (own + secrets.token_bytes(LEASE_ID_BYTES - TAG_BYTES)).hex()


def tag_of(lease_id: str) -> bytes | None:
    """The conversation's tag in a lease id, or ``None`` if it is not ours."""
    if len(lease_id) != 2 * LEASE_ID_BYTES:
        return None
    try:
        return bytes.fromhex(lease_id)[:TAG_BYTES]
    except ValueError:
        return None


def _digest(person: bytes, *parts: str, size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size, person=person)
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
