"""A verified pull, in the words in which stock code reads blocks."""

from collections.abc import Mapping
from typing import Any, Final

from kvloom.protocol import confirm_at_of, lease_of

from .proofs import ReadProof
from .returns import Pull

READ_MARK: Final = "kvloom-read"
"""Begins the name under which prefill reports a read to decode's worker."""


def proof_of(params: Mapping[str, Any]) -> ReadProof | None:
    """Whom to ask after a read; stock prefill engines can't be asked."""
    name = params.get("remote_request_id", "")
    if params.get("do_remote_decode"):
        ref = lease_of(params)
        if ref is None:
            return None
        return ReadProof(
            address=ref.address,
            lease_id=ref.lease_id,
            claim_id=name.removeprefix(f"{READ_MARK}-"),
        )
    address = confirm_at_of(params)
    return ReadProof(address=address, lease_id=name) if address else None


def read_params(pull: Pull, block_size: int) -> dict[str, Any]:
    """What stock code needs to read exactly the verified blocks.

    Cut to the verified length: stock code aligns the remote list's end with
    the last local block.
    """
    claimed = pull.claimed
    num_blocks = -(-pull.num_tokens // block_size)
    return {
        "remote_block_ids": [group[:num_blocks] for group in claimed.blocks],
        "remote_engine_id": claimed.engine_id,
        "remote_request_id": f"{READ_MARK}-{claimed.claim_id}",
        "remote_host": claimed.host,
        "remote_port": claimed.port,
        "remote_num_tokens": pull.num_tokens,
        "tp_size": claimed.tp_size,
        "dcp_size": claimed.dcp_size,
        "pp_size": claimed.pp_size,
    }
