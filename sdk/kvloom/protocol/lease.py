"""The lease service's messages: decode's promises, and who asks for them.

One ZeroMQ ROUTER socket an engine, in its scheduler process. A peer is a
DEALER: another engine (claims, proofs of reads) or the router (the feed).
Prefill engines have one too: they grant no leases, and confirm what decode read.
Frames:

    request   op, tag, body      tag: opaque bytes, echoed
    reply     op, tag, body      op: the reply's own, ``refused`` on a refusal
    feed      b"event", b"", body

A body is the MessagePack of the dataclass that ``MESSAGES`` names for the op.
Both sides drop what they can't read.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

PROTOCOL_VERSION: Final = 2
"""2 added :class:`Releases`."""
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Enough for the digests of a million tokens in blocks of 16, twice over."""

MAX_RELEASES: Final = 1000
"""Leases in one :class:`Releases`; what is beyond is passed over, so that no message
holds an engine up for long."""

DIGEST_BYTES: Final = 16
"""Of a block's digest (BLAKE2b, chained)."""


PROVISIONAL: Final = "provisional"
"""The reason of a ``granted`` event whose lease lives for a moment only.

A stop string is found outside the engine, which then sees an aborted request,
as after a client's leaving. Who knows that the answer ended well renews it.
"""
RENEWED: Final = "renewed"
"""The reason of the event of a renewal."""


class LeaseState(StrEnum):
    """``granted → claimed → released | expired | evicted``."""

    GRANTED = "granted"
    CLAIMED = "claimed"
    RELEASED = "released"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DECLINED = "declined"
    """No lease was given for a turn that asked for one; the event says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a conversation with a lease service."""

    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Who answers: an engine, in one life of its process."""

    version: int
    engine_id: str
    boot_id: str
    """Changes with every start of the engine: leases of another boot are gone."""
    block_size: int
    """Tokens a block."""
    seq: int = -1
    """The feed's last event; every one up to it was sent before this."""
    is_subscribed: bool = False
    """Whether who asks hears the feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A prefill engine asks to read a lease."""

    lease_id: str
    claim_id: str
    """Chosen by the claimer; names the claim in ``Release``."""
    digests: bytes
    """The new prompt's own block digests, in a row."""
    timeout_s: float
    """How long decode keeps the blocks if the claim is never released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A granted claim: where the blocks are, and proof of what they hold."""

    lease_id: str
    claim_id: str
    num_tokens: int
    """Tokens whose KV exists."""
    block_size: int
    blocks: list[list[int]]
    """Block ids, one list a KV-cache group."""
    digests: bytes
    """The lease's block digests, in a row; full blocks only."""
    edge_block: int
    """Index of the first block that differs from the claim's digests, or of
    the partial last block."""
    edge_tokens: list[int]
    """That block's token ids, so that the common prefix ends on a token."""
    edge_extra: bytes
    """Digest of what else shapes that block: LoRA, salt, multimodal content."""
    engine_id: str
    host: str
    """Of NIXL's side channel."""
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Ends a claim (``claim_id``), or the lease itself (``None``)."""

    lease_id: str
    claim_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Ends these leases. There is no reply: the feed tells of each that was there, of
    one that is claimed when its claims end.

    A router lets go of a lease with nearly every turn, so that a message and a reply
    for each would be most of what it and an engine have to say to each other.
    """

    lease_ids: list[str]
    """At most :data:`MAX_RELEASES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """After a read: was what was read kept in place until now?

    ``claim_id`` names a claim on a lease; ``None`` asks a prefill engine about
    the blocks of the request ``lease_id``. The reply is ``Done`` or ``Refused``.
    """

    lease_id: str
    claim_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """A decode engine waits for a prompt: is its KV ready?

    The reply is ``Announced``, ``Refused``, or ``Pending``; after ``Pending``
    one of the others follows under the same tag as soon as it is known.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """The awaited prompt is not done."""

    name: str
    is_known: bool
    """Whether it has arrived at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The awaited prompt's KV is ready."""

    name: str
    params: dict[str, Any]
    """What prefill answers the router, too: all that decode needs to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Keep the lease ``ttl_s`` from now: a tool runs longer than expected, or a
    provisional lease's turn turned out to have ended well."""

    lease_id: str
    ttl_s: float | None = None
    """``None``: as long as the engine keeps any lease."""
    expected_return_s: float | None = None
    """When the next turn is expected, from now; leases that are expected back
    soonest are given up last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The reply to ``Release``, ``Renew`` and ``Confirm``."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The reply to what can't be had."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One live lease, as ``ListLeases`` shows it."""

    lease_id: str
    state: LeaseState
    num_tokens: int
    num_blocks: int
    deadline_unix: float
    is_provisional: bool = False
    """Whether it ends soon unless it is renewed; see :data:`PROVISIONAL`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLeases:
    """Asks for every live lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """Asks for the feed from now on, and for all that it is about.

    A subscriber that was not heard for :data:`SUBSCRIPTION_S` is forgotten;
    whatever it says is a sign of life, such as ``Hello``.
    """


SUBSCRIPTION_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """The reply to ``ListLeases`` and ``Subscribe``: a consistent snapshot."""

    engine_id: str
    boot_id: str
    seq: int
    """The feed's last event that the snapshot includes."""
    leases: list[LeaseRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """What became of the prompt of a turn that no prefill engine saw."""

    prompt_tokens: int
    cached_tokens: int
    """So many of them were in decode's own prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvent:
    """One state change, in order; a gap in ``seq`` asks for ``Subscribe``."""

    seq: int
    lease_id: str
    state: LeaseState
    num_tokens: int
    deadline_unix: float
    reason: str = ""
    answer: list[int] | None = None
    """Of a ``granted`` event whose turn asked for it: the ids of the generated
    tokens, the one that ended the answer included. ``None`` also where no token
    ended it (its length, a stop string)."""
    counts: PromptCounts | None = None
    """Of a ``granted`` event whose turn decode did alone."""


MESSAGES: Final[dict[bytes, type[Any]]] = {
    b"hello": Hello,
    b"welcome": Welcome,
    b"claim": Claim,
    b"claimed": Claimed,
    b"release": Release,
    b"releases": Releases,
    b"renew": Renew,
    b"confirm": Confirm,
    b"await": Await,
    b"pending": Pending,
    b"announced": Announced,
    b"done": Done,
    b"refused": Refused,
    b"list": ListLeases,
    b"subscribe": Subscribe,
    b"leases": Leases,
    b"event": LeaseEvent,
}
"""The body of each op."""

OPS: Final[dict[type[Any], bytes]] = {body: op for op, body in MESSAGES.items()}
"""The op of each body."""
