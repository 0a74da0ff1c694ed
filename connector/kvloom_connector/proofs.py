"""No KV is used before the engine it was read from has said that it was there.

A read has no lock: the other engine promises to keep the blocks for a time, and
a reader that is held up (a frozen process, a paused machine) reads what stands
there later. So after each read the reader asks, and only a promise that still
held then makes the KV good. Anything else is a failed read, which vLLM computes
locally and never caches.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvloom.protocol import Confirm, Done

from .peers import PeerError, Peers

CONFIRM_TIMEOUT_S = 1.0
"""An engine that does not answer in this time has not confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProof:
    """Whom to ask about a read, and for what."""

    address: str
    """Of the engine's lease service."""
    lease_id: str
    """The lease, or the prefill request whose blocks were handed over."""
    claim_id: str | None = None


class ProofDesk:
    """The reads of one worker that wait for their proof; one thread's alone.

    Args:
        cluster_key: the one that the engines are configured with.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        *,
        cluster_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._peers = Peers(self._context, cluster_key=cluster_key)
        self._expected: dict[str, ReadProof] = {}
        self._asked: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._expected) + len(self._asked)

    def expect(self, request_id: str, proof: ReadProof) -> None:
        """A read of this request was begun."""
        self._expected[request_id] = proof

    def sift(self, finished: set[str], failed: set[str]) -> None:
        """Take out of ``finished`` what is not proved yet, and put back what is.

        Args:
            finished: requests whose reads ended, failed ones included; changed.
            failed: those of them that failed; gets those that are disproved.
        """
        for request_id in list(finished):
            proof = self._expected.pop(request_id, None)
            if proof is not None and request_id not in failed:
                finished.discard(request_id)
                self._ask(request_id, proof)
        for request_id, is_good in self._verdicts():
            finished.add(request_id)
            if not is_good:
                failed.add(request_id)

    def _ask(self, request_id: str, proof: ReadProof) -> None:
        confirm = Confirm(lease_id=proof.lease_id, claim_id=proof.claim_id)
        self._asked[request_id] = self._clock() + CONFIRM_TIMEOUT_S
        try:
            self._peers.send(proof.address, confirm, tag=request_id.encode())
        except PeerError:
            self._asked[request_id] = self._clock()

    def _verdicts(self) -> list[tuple[str, bool]]:
        if not self._asked:
            return []
        verdicts = []
        for tag, answer in self._peers.received():
            request_id = tag.decode(errors="replace")
            if self._asked.pop(request_id, None) is not None:
                verdicts.append((request_id, isinstance(answer, Done)))
        now = self._clock()
        late = [request_id for request_id, end in self._asked.items() if end <= now]
        for request_id in late:
            del self._asked[request_id]
            verdicts.append((request_id, False))
        return verdicts

    def close(self) -> None:
        """Close the connections."""
        self._context.destroy(linger=0)
