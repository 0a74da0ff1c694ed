"""The prefill engine's half of a return: claim, compare, never trust."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from kvloom.protocol import (
    DIGEST_BYTES,
    MAX_MESSAGE_BYTES,
    MESSAGES,
    OPS,
    Claim,
    Claimed,
    LeaseRef,
    Reason,
    Release,
)

from .cache import common_length

# Long enough to hand a message to a live peer, short enough not to wait for a
# dead one.
_LINGER_MS = 100

CLAIM_TIMEOUT_S = 30.0
"""How long decode keeps the blocks of a claim that is never released."""


class ClaimError(Exception):
    """A lease could not be had; prefill computes locally instead."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as prefill knows it."""

    token_ids: Sequence[int]
    digests: Sequence[bytes]
    """Of its full blocks."""
    extra: bytes
    """Digest of what else shapes its KV."""
    block_size: int


@contextlib.asynccontextmanager
async def claimed(
    context: zmq.asyncio.Context, ref: LeaseRef, prompt: Prompt, *, wait_s: float
) -> AsyncIterator[Claimed]:
    """A claim on a lease, released at the end.

    Raises:
        ClaimError: refused, or not answered within ``wait_s`` seconds.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    claim = Claim(
        lease_id=ref.lease_id,
        claim_id=uuid.uuid4().hex,
        digests=b"".join(prompt.digests),
        timeout_s=CLAIM_TIMEOUT_S,
    )
    try:
        answer = await _claim(socket, ref, claim, wait_s=wait_s)
        try:
            yield answer
        finally:
            await _release(socket, claim, wait_s=wait_s)
    finally:
        socket.close()


def verified_tokens(answer: Claimed, prompt: Prompt) -> int:
    """Tokens of the prompt that the lease is proven to hold.

    The longest common prefix, never more; at least one token is left, because
    an engine has to compute something to answer.
    """
    if answer.block_size != prompt.block_size:
        return 0
    theirs = [
        answer.digests[i : i + DIGEST_BYTES]
        for i in range(0, len(answer.digests), DIGEST_BYTES)
    ]
    blocks = common_length(prompt.digests, theirs)
    length = blocks * prompt.block_size
    if answer.edge_block == blocks and answer.edge_extra == prompt.extra:
        edge = prompt.token_ids[length : length + prompt.block_size]
        length += common_length(edge, answer.edge_tokens)
    return min(length, trusted_tokens(answer, prompt))


def trusted_tokens(answer: Claimed, prompt: Prompt) -> int:
    """What an engine pulls that compares nothing, as stock vLLM does."""
    return min(answer.num_tokens, len(prompt.token_ids) - 1)


async def _claim(
    socket: zmq.asyncio.Socket, ref: LeaseRef, claim: Claim, *, wait_s: float
) -> Claimed:
    try:
        socket.connect(ref.address)
        answer = await _ask(socket, claim, wait_s=wait_s)
    except (
        TimeoutError,
        zmq.ZMQError,
        msgspec.DecodeError,
        RecursionError,
    ) as error:
        await _take_back(socket, claim)
        raise ClaimError(Reason.CLAIM_LATE) from error
    if not isinstance(answer, Claimed):
        raise ClaimError(Reason.CLAIM_REFUSED)
    return answer


async def _take_back(socket: zmq.asyncio.Socket, claim: Claim) -> None:
    """End a claim that may yet be granted, without waiting for an answer."""
    release = Release(lease_id=claim.lease_id, claim_id=claim.claim_id)
    frames = [OPS[Release], b"", msgspec.msgpack.encode(release)]
    # Without a peer there is nothing to take back.
    with contextlib.suppress(zmq.ZMQError):
        await socket.send_multipart(frames, flags=zmq.NOBLOCK)


async def _release(socket: zmq.asyncio.Socket, claim: Claim, *, wait_s: float) -> None:
    release = Release(lease_id=claim.lease_id, claim_id=claim.claim_id)
    # Decode's own timeout ends the claim when this message is lost.
    with contextlib.suppress(TimeoutError, zmq.ZMQError, msgspec.DecodeError):
        await _ask(socket, release, wait_s=wait_s)


async def _ask(
    socket: zmq.asyncio.Socket, message: Claim | Release, *, wait_s: float
) -> object:
    tag = uuid.uuid4().bytes
    frames = [OPS[type(message)], tag, msgspec.msgpack.encode(message)]
    async with asyncio.timeout(wait_s):
        await socket.send_multipart(frames)
        while True:
            op, echoed, body = await socket.recv_multipart()
            if echoed == tag and op in MESSAGES:
                return msgspec.msgpack.decode(body, type=MESSAGES[op])
