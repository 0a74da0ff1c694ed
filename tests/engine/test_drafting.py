"""A decode engine that drafts tokens, some of which it takes back."""

from collections.abc import Iterator

import pytest
from duo import SMALL, Duo
from letters import second_turn, user
from shelf import Shelf
from waiting import common_prefix_len

from kvloom_server.cluster.engine_args import Role

CHANT = "one two three four, one two three four, " * 30


@pytest.fixture(scope="module")
def drafting(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    """A decode engine with speculative decoding, by n-grams of the prompt."""
    shelf.clear()
    draft = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3,'
    draft += '"prompt_lookup_min":1}'
    args = (*SMALL, f"--speculative-config={draft}")
    with Duo(tmp_path_factory.mktemp("drafting"), decode_args=args) as opened:
        yield opened


@pytest.mark.parametrize("max_tokens", [2, 5, 24, 61])
def test_a_drafting_decode_engine_leases_no_token_too_many(
    drafting: Duo, max_tokens: int
) -> None:
    """What it drafted and took back is not in the lease, and all else is."""
    messages = [user(f"Go on with this, {max_tokens}: {CHANT}")]
    body = {"max_tokens": max_tokens, "ignore_eos": True}
    truth = drafting.oracle(messages, **body)
    drafted = drafting.metric(Role.DECODE, "vllm:spec_decode_num_draft_tokens_total")
    first = drafting.turn(messages, **body)
    assert first.output == truth
    drafts = drafting.metric(Role.DECODE, "vllm:spec_decode_num_draft_tokens_total")
    assert drafts > drafted or max_tokens == 2, "the engine drafted nothing"
    # The last token of an answer was sampled, and never run.
    assert drafting.leases()[first.lease_id].num_tokens == len(first.history) - 1
    again, second = second_turn(drafting, messages, first, "Go on.", **body)
    common = common_prefix_len(first.history[:-1], second.prompt)
    assert second.outcome.returned_tokens == common
    # Nor did anything wrong get into a prefix cache.
    assert drafting.turn(again, **body).output == second.output
    drafting.assert_nothing_is_held()
