"""The first requests to engines: what they serve, and that they can exchange KV.

Every prefill engine meets every decode engine before a user's turn does: the first
read between two engines sets up NIXL's connection, which takes a second or more. Here
that read is one of ours: a two-turn conversation of random tokens, both ways. It also
shows that the cluster returns at all.
"""

import random
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from kvloom.protocol import (
    OPS,
    LeaseRef,
    Release,
    decode_params,
    outcome_of,
    prefill_params,
)
from kvloom_server.curve import secure_peer
from kvloom_server.router.engine import RANK_HEADER

from .engine_args import EngineSlot, Role
from .launch import ClusterError
from .probe import bearer, model_at

# Of each of the two turns: more than any threshold below which an engine would not
# read what the other has.
TURN_TOKENS = 160
RELEASE_LINGER_S = 1
# Ids that every vocabulary has, and that are no control tokens.
_TOKEN_IDS = range(300, 20_000)


class IntroductionError(RuntimeError):
    """Two engines could not exchange KV; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What two engines exchanged."""

    prefill: str
    decode: str
    num_returned: int
    """Tokens that went back from decode to prefill."""


async def served_model(slot: EngineSlot, *, api_key: str | None = None) -> str:
    """The name under which an engine serves its model.

    Raises:
        ClusterError: it does not say.
    """
    async with aiohttp.ClientSession(headers=bearer(api_key)) as session:
        model = await model_at(session, slot.url)
    if isinstance(model, str):
        return model
    if model.status == HTTPStatus.UNAUTHORIZED:
        raise _locked(slot)
    raise ClusterError(
        f"engine {slot.name} does not say which model it serves ({model.reason}): its "
        "log may tell why"
    )


def _locked(slot: EngineSlot) -> ClusterError:
    return ClusterError(
        f"engine {slot.name} asks for an API key that is not known here: set "
        "KVLOOM_UPSTREAM_API_KEY to it, or give it as --engine-arg=--api-key=…"
    )


async def introduce(
    slots: list[EngineSlot],
    *,
    model: str,
    is_returning: bool,
    api_key: str | None = None,
    cluster_key: bytes | None = None,
) -> list[Introduction]:
    """One conversation for each pair of engines.

    Args:
        slots: where the engines are.
        model: the name to ask for.
        is_returning: whether KV is to go back to prefill.
        api_key: what the engines' API asks for.
        cluster_key: what the engines' lease services ask for.

    Raises:
        ClusterError: an engine asks for another API key.
        IntroductionError: an engine refused its part.
    """
    prefill, decode = _peers(slots, Role.PREFILL), _peers(slots, Role.DECODE)
    async with aiohttp.ClientSession(headers=bearer(api_key)) as session:
        return [
            await _meet(
                session,
                p,
                d,
                model=model,
                is_returning=is_returning,
                cluster_key=cluster_key,
            )
            for p in prefill
            for d in decode
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """One engine: a server, or one rank of it."""

    slot: EngineSlot
    rank: int | None
    lease_address: str

    @property
    def name(self) -> str:
        return self.slot.name if self.rank is None else f"{self.slot.name}#{self.rank}"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}


def _peers(slots: list[EngineSlot], role: Role) -> list[_Peer]:
    return [
        _Peer(slot=slot, rank=rank, lease_address=lease)
        for slot in slots
        if slot.role is role
        for rank, lease in slot.ranks_and_leases
    ]


async def _meet(
    session: aiohttp.ClientSession,
    prefill: _Peer,
    decode: _Peer,
    *,
    model: str,
    is_returning: bool,
    cluster_key: bytes | None,
) -> Introduction:
    begun = random.sample(_TOKEN_IDS, TURN_TOKENS)
    whole = begun + random.sample(_TOKEN_IDS, TURN_TOKENS)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": uuid.uuid4().hex,
    }
    lease = None
    if is_returning:
        # Decode has computed what prefill has not, as after a turn that it did alone.
        turn_id = uuid.uuid4().hex
        lease = LeaseRef(lease_id=turn_id, address=decode.lease_address)
        first = body | {"prompt": begun}
        await _ask(session, decode, first, params=decode_params(None, turn_id=turn_id))
    second = body | {"prompt": whole}
    handed = await _ask(session, prefill, second, params=prefill_params(lease))
    params = handed["kv_transfer_params"]
    await _ask(session, decode, second, params=decode_params(params, turn_id=None))
    if lease is not None:
        await _release(decode.lease_address, lease.lease_id, cluster_key)
    outcome = outcome_of(params) if is_returning else None
    return Introduction(
        prefill=prefill.name,
        decode=decode.name,
        num_returned=outcome.returned_tokens if outcome else 0,
    )


async def _release(address: str, lease_id: str, cluster_key: bytes | None) -> None:
    release = Release(lease_id=lease_id)
    body = msgspec.msgpack.encode(release)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = int(1000 * RELEASE_LINGER_S)
        secure_peer(dealer, cluster_key)
        dealer.connect(address)
        await dealer.send_multipart([OPS[Release], b"", body])
        # The reply says that it arrived; a lease that stays would only expire.
        await dealer.poll(1000 * RELEASE_LINGER_S)


async def _ask(
    session: aiohttp.ClientSession,
    peer: _Peer,
    body: dict[str, Any],
    *,
    params: dict[str, Any] | None,
) -> dict[str, Any]:
    async with session.post(
        f"{peer.slot.url}/v1/completions",
        json=body | {"kv_transfer_params": params},
        headers=peer.headers,
    ) as response:
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise _locked(peer.slot)
        if response.status != HTTPStatus.OK:
            text = (await response.text())[:500]
            raise IntroductionError(
                f"engine {peer.name} answered {response.status} to a first request, "
                f"so the cluster would not serve: {text}"
            )
        answer: dict[str, Any] = await response.json()
        return answer
