"""A decode engine whose KV prefill can't use, though the tokens are the same."""

import pytest
from duo import SMALL, Duo
from letters import letter, user
from shelf import Shelf

from kvloom.protocol import Reason, decode_params, outcome_of, prefill_params
from kvloom_server.cluster.engine_args import Role


@pytest.mark.parametrize(
    "other", ["--dtype=bfloat16", "--block-size=64"], ids=["dtype", "block size"]
)
def test_a_lease_of_another_kind_of_kv_is_never_read(
    shelf: Shelf, tmp_path_factory: pytest.TempPathFactory, other: str
) -> None:
    """Prefill computes; nobody waits, and nothing stays held."""
    shelf.clear()
    folder = tmp_path_factory.mktemp("other-kind")
    with Duo(folder, decode_args=(*SMALL, other)) as duo:
        first = duo.turn(letter(7))
        again = [*letter(7), first.message, user("And in spring?")]
        truth = duo.oracle(again, max_tokens=1)
        duo.forget()
        params = prefill_params(duo.ref(first.lease_id))
        answer = duo.ask(Role.PREFILL, again, params=params, max_tokens=1)
        outcome = outcome_of(answer["kv_transfer_params"])
        assert outcome is not None
        assert outcome.returned_tokens == 0 or outcome.why is Reason.READ_FAILED
        assert answer["choices"][0]["token_ids"] == truth
        handed = decode_params(answer["kv_transfer_params"], turn_id="other-kind")
        duo.ask(Role.DECODE, again, params=handed)
        duo.assert_nothing_is_held()
