"""Which conversation a turn belongs to, and what is known of it."""

import msgspec
from msgspec.structs import replace

from .bodies import history_of
from .derive import Chains, Derived
from .directory import Directory
from .identity import conversation_tag, short_digest
from .plan import Conversation
from .request import TurnRequest


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation of one turn; ``tag`` is ``None`` where it has none."""

    tag: bytes | None = None
    parent: bytes | None = None
    """Tag of the conversation that it branched off from."""


class Names:
    """Names turns: as the client says, else by their history. One a router."""

    def __init__(self, *, directory: Directory, chains: Chains | None) -> None:
        """Without ``chains``, who names no conversation has none."""
        self._directory = directory
        self._chains = chains

    def name(self, request: TurnRequest, *, tenant: str = "") -> Named:
        """The conversation of a turn, which is remembered."""
        if request.conversation is not None:
            return Named(tag=_tag(request, tenant, request.conversation))
        derived = self._derived(request, tenant)
        if derived is None:
            return Named()
        parent = derived.parent
        return Named(
            tag=_tag(request, tenant, derived.conversation),
            parent=None if parent is None else _tag(request, tenant, parent),
        )

    def known(self, named: Named) -> Conversation | None:
        """What is remembered of a conversation; a branch that has nothing yet
        begins where its parent is."""
        own = self._directory.find(named.tag) if named.tag is not None else None
        if named.parent is None or named.tag is None or (own and own.leases):
            return own
        parent = self._directory.find(named.parent)
        if parent is None:
            return own
        begun = own or replace(parent, tag=named.tag)
        return replace(begun, leases=parent.leases, lost=parent.lost)

    def _derived(self, request: TurnRequest, tenant: str) -> Derived | None:
        if self._chains is None:
            return None
        history = history_of(request.api, request.body)
        if history is None:
            return None
        return self._chains.conversation_of(short_digest(tenant), history.chain)


def _tag(request: TurnRequest, tenant: str, conversation: str) -> bytes:
    return conversation_tag(
        tenant=tenant, model=request.model, conversation=conversation
    )
