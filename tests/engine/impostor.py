"""A decode engine's lease service that breaks its word, in a chosen way."""

import threading
from typing import Any, Self

import msgspec
import zmq

from kvloom.protocol import OPS, Claim, Claimed, Refused
from kvloom_connector.digest import ladder

BLOCK_SIZE = 32


class Impostor:
    """Answers claims for a prompt that it was told to expect.

    Args:
        pair: the real pair whose decode engine it poses as.
        how: what goes wrong.
    """

    def __init__(self, pair: Any, *, how: str) -> None:
        self._how = how
        self._tokens: list[int] = []
        # Nobody listens on the discard service's port.
        self._side_port = pair.side_port if how == "engine is another" else 9
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def expect(self, tokens: list[int]) -> None:
        """Claims will be for this prompt."""
        self._tokens = tokens

    def __enter__(self) -> Self:
        if self._how == "gone":
            self._socket.close(0)
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._is_stopping.is_set():
            if not self._socket.poll(50):
                continue
            peer, op, tag, body = self._socket.recv_multipart()
            if op != OPS[Claim]:
                continue
            claim = msgspec.msgpack.decode(body, type=Claim)
            reply = self._reply(claim)
            if reply is not None:
                self._socket.send_multipart([peer, reply[0], tag, reply[1]])

    def _reply(self, claim: Claim) -> tuple[bytes, bytes] | None:
        match self._how:
            case "silent":
                return None
            case "garbage":
                return b"claimed", b"\xc1 not MessagePack"
            case "refuses":
                return _framed(Refused(reason="no such lease"))
            case _:
                return _framed(self._promise(claim))

    def _promise(self, claim: Claim) -> Claimed:
        is_other = self._how == "other content"
        tokens = [t + is_other for t in self._tokens]
        num_blocks = len(tokens) // BLOCK_SIZE
        return Claimed(
            lease_id=claim.lease_id,
            claim_id=claim.claim_id,
            num_tokens=num_blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE * (2 if self._how == "other block size" else 1),
            blocks=[list(range(1, num_blocks + 1))],
            digests=ladder(tokens, block_size=BLOCK_SIZE),
            edge_block=num_blocks,
            edge_tokens=[],
            edge_extra=b"",
            engine_id="impostor",
            host="127.0.0.1",
            port=self._side_port,
            tp_size=1,
            dcp_size=1,
            pp_size=1,
        )


def _framed(message: Any) -> tuple[bytes, bytes]:
    return OPS[type(message)], msgspec.msgpack.encode(message)
