"""Proof of what KV holds: a ladder of block digests, and the verified length.

A block's digest is chained over the block before it, its token ids and what
else shapes its KV (LoRA, salt, multimodal content). Equal digests therefore
mean an equal history. Pure; token ids are 32-bit, as everywhere in vLLM.
"""

import hashlib
from array import array
from collections.abc import Sequence

from kvloom.protocol import DIGEST_BYTES, Claimed


def ladder(
    tokens: Sequence[int], *, block_size: int, extras: Sequence[bytes] = ()
) -> bytes:
    """The digests of all full blocks of ``tokens``, in a row.

    Args:
        tokens: token ids.
        block_size: tokens a block.
        extras: one entry a block: what else shapes it; missing ones are empty.

    Returns:
        ``DIGEST_BYTES`` bytes for each of ``len(tokens) // block_size`` blocks.
    """
    packed = array("i", tokens).tobytes()
    stride = array("i").itemsize * block_size
    rungs: list[bytes] = []
    above = b""
    for index in range(len(tokens) // block_size):
        extra = extras[index] if index < len(extras) else b""
        digest = hashlib.blake2b(
            above, digest_size=DIGEST_BYTES, person=b"kvloom-block"
        )
        digest.update(len(extra).to_bytes(4, "little"))
        digest.update(extra)
        digest.update(packed[index * stride : (index + 1) * stride])
        above = digest.digest()
        rungs.append(above)
    return b"".join(rungs)


def common_rungs(mine: bytes, theirs: bytes) -> int:
    """How many blocks from the start have equal digests."""
    most = min(len(mine), len(theirs)) // DIGEST_BYTES
    for index in range(most):
        rung = slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES)
        if mine[rung] != theirs[rung]:
            return index
    return most


def verified_tokens(
    prompt: Sequence[int],
    *,
    digests: bytes,
    extras: Sequence[bytes],
    claimed: Claimed,
) -> int:
    """How many leading tokens of ``prompt`` the lease's KV was computed for.

    The longest common prefix, to the token: whole blocks by digest, and inside
    the first block that differs (or the partial last one) by token id, where
    nothing else shapes that block differently. Never more than the lease's
    valid tokens, nor than the blocks that come with it hold.

    Args:
        prompt: the new prompt's token ids.
        digests: its own ladder, in blocks of ``claimed.block_size``.
        extras: what else shapes its blocks, partial last block included.
        claimed: decode's answer; not trusted beyond what it proves.
    """
    block_size = claimed.block_size
    edge = common_rungs(digests, claimed.digests)
    verified = edge * block_size
    if edge == claimed.edge_block:
        extra = extras[edge] if edge < len(extras) else b""
        if extra == claimed.edge_extra:
            mine = prompt[verified : verified + block_size]
            verified += common_prefix_len(mine, claimed.edge_tokens)
    held = min(map(len, claimed.blocks), default=0) * block_size
    return max(0, min(verified, claimed.num_tokens, held, len(prompt)))


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
