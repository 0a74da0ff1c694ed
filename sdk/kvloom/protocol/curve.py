"""One cluster key, and the key pairs of CURVE that both ends derive from it.

Whoever does not know the cluster key can neither reach a lease service (its
public key is never sent) nor read what passes.
"""

import hashlib
from enum import StrEnum
from typing import Final

MIN_CLUSTER_KEY_BYTES: Final = 16


class CurveSide(StrEnum):
    """Whose key pair."""

    SERVICE = "service"
    """A decode engine's lease service."""
    PEER = "peer"
    """A prefill engine, or a router."""


class ClusterKeyError(ValueError):
    """The cluster key is of no use; the message says why."""


def curve_secret(cluster_key: bytes, side: CurveSide) -> bytes:
    """The secret key of one side: 32 bytes, any of which make a Curve25519 key.

    Raises:
        ClusterKeyError: the cluster key is too short.
    """
    if len(cluster_key) < MIN_CLUSTER_KEY_BYTES:
        raise ClusterKeyError(
            f"the cluster key has {len(cluster_key)} bytes, at least "
            f"{MIN_CLUSTER_KEY_BYTES} are needed: make one with `openssl rand -hex 32`"
        )
    return hashlib.blake2b(
        cluster_key, digest_size=32, person=f"kvloom-{side}".encode()
    ).digest()
