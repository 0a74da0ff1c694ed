"""Proof of what KV holds: ladders of digests, and the verified length."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import DIGEST_BYTES, Claim, Claimed
from kvloom_connector.digest import (
    common_prefix_len,
    common_rungs,
    ladder,
    verified_tokens,
)
from kvloom_connector.lease import Lease
from kvloom_connector.service import EngineIdentity, prove

# Few different ids, so that different histories agree now and then.
TOKENS = st.lists(st.integers(0, 2), max_size=40)
BLOCK_SIZES = st.integers(1, 8)
EXTRAS = st.lists(st.sampled_from([b"", b"salt", b"image"]), max_size=8)
ANY_INT = st.integers(-(2**63), 2**64 - 1)


@st.composite
def histories(draw):
    """A leased history and the next prompt, which is an edit of it."""
    leased = draw(TOKENS)
    start = draw(st.integers(0, len(leased)))
    end = draw(st.integers(start, len(leased)))
    prompt = leased[:start] + draw(TOKENS) + leased[end:]
    return leased, draw(st.sampled_from([prompt, leased, leased[:start]]))


def claimed_by(
    prompt, leased, *, block_size, prompt_extras=(), lease_extras=(), num_tokens=None
):
    """What decode answers to the claim of such a prompt on such a lease."""
    num_blocks = -(-len(leased) // block_size)
    lease = Lease(
        lease_id="lease",
        num_tokens=len(leased) if num_tokens is None else num_tokens,
        blocks=(tuple(range(num_blocks)),),
        tokens=leased,
        digests=ladder(leased, block_size=block_size, extras=lease_extras),
        extras=tuple(lease_extras),
        deadline=0.0,
    )
    digests = ladder(prompt, block_size=block_size, extras=prompt_extras)
    claim = Claim(lease_id="lease", claim_id="claim", digests=digests, timeout_s=1.0)
    engine = EngineIdentity(
        engine_id="d0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        block_size=block_size,
    )
    return prove(claim, lease, engine)


def verified(prompt, claimed, *, extras=()):
    """The verified length of ``prompt`` under an answer in its own blocks."""
    digests = ladder(prompt, block_size=claimed.block_size, extras=extras)
    return verified_tokens(prompt, digests=digests, extras=extras, claimed=claimed)


@given(histories(), BLOCK_SIZES)
def test_verified_length_is_the_longest_common_prefix(history, block_size):
    """Whatever was edited, put in, cut or added: every token up to the first
    difference is reused, and not one more."""
    leased, prompt = history
    claimed = claimed_by(prompt, leased, block_size=block_size)
    assert verified(prompt, claimed) == common_prefix_len(prompt, leased)


@given(histories(), BLOCK_SIZES, EXTRAS, EXTRAS)
def test_another_salt_adapter_or_image_ends_the_prefix(
    history, block_size, mine, theirs
):
    """KV that something else shaped is never reused, even if all token ids
    agree: the prefix ends before the first block that was shaped otherwise."""
    leased, prompt = history
    claimed = claimed_by(
        prompt,
        leased,
        block_size=block_size,
        prompt_extras=mine,
        lease_extras=theirs,
    )
    pad = [b""] * 8
    differs = common_prefix_len([*mine, *pad], [*theirs, *pad])
    common = common_prefix_len(prompt, leased)
    expected = common if differs >= 8 else min(common, differs * block_size)
    assert verified(prompt, claimed, extras=mine) == expected


@given(histories(), BLOCK_SIZES, st.integers(0, 40))
def test_never_more_than_the_tokens_whose_kv_exists(history, block_size, num_tokens):
    """A lease that counts fewer valid tokens than it names is taken at that."""
    leased, prompt = history
    claimed = claimed_by(prompt, leased, block_size=block_size, num_tokens=num_tokens)
    common = common_prefix_len(prompt, leased)
    assert verified(prompt, claimed) == min(common, num_tokens)


@given(histories(), BLOCK_SIZES, st.data())
def test_never_more_than_the_blocks_that_came_hold(history, block_size, data):
    """An answer with too few blocks is read no further than they go."""
    leased, prompt = history
    claimed = claimed_by(prompt, leased, block_size=block_size)
    keep = data.draw(st.integers(0, len(claimed.blocks[0])))
    short = replace(claimed, blocks=[claimed.blocks[0][:keep]])
    common = common_prefix_len(prompt, leased)
    assert verified(prompt, short) == min(common, keep * block_size)
    assert verified(prompt, replace(claimed, blocks=[])) == 0


@given(st.data(), histories(), BLOCK_SIZES)
def test_a_lying_answer_gains_nothing(data, history, block_size):
    """Garbage in any field of an answer raises nothing and verifies no token
    that equal digests, or equal token ids at their end, do not prove."""
    leased, prompt = history
    honest = claimed_by(prompt, leased, block_size=block_size)
    lie = Claimed(
        lease_id=honest.lease_id,
        claim_id=honest.claim_id,
        num_tokens=data.draw(st.just(honest.num_tokens) | ANY_INT),
        block_size=data.draw(st.just(block_size) | st.integers(-4, 50)),
        blocks=data.draw(
            st.just(honest.blocks)
            | st.lists(st.lists(ANY_INT, max_size=4), max_size=3)
            | st.just([list(range(1000))])
        ),
        digests=data.draw(
            st.just(honest.digests)
            | st.binary(max_size=70)
            | st.integers(0, 50).map(lambda n: honest.digests[:n])
        ),
        edge_block=data.draw(st.just(honest.edge_block) | ANY_INT),
        edge_tokens=data.draw(st.just(prompt) | TOKENS | st.lists(ANY_INT)),
        edge_extra=data.draw(st.just(b"") | st.binary(max_size=4)),
        engine_id="d0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
    )
    digests = ladder(prompt, block_size=block_size)
    found = verified_tokens(prompt, digests=digests, extras=(), claimed=lie)

    rungs = common_rungs(digests, lie.digests)
    proven = rungs * lie.block_size
    if lie.edge_block == rungs and lie.edge_extra == b"" and lie.block_size > 0:
        mine = prompt[proven : proven + lie.block_size]
        proven += common_prefix_len(mine, lie.edge_tokens)
    assert 0 <= found <= max(0, min(proven, lie.num_tokens, len(prompt)))


@given(TOKENS, BLOCK_SIZES, EXTRAS)
def test_a_ladder_has_one_rung_a_full_block(tokens, block_size, extras):
    """A history's digests are the first digests of every continuation."""
    whole = ladder(tokens, block_size=block_size, extras=extras)
    assert len(whole) == len(tokens) // block_size * DIGEST_BYTES
    for cut in range(len(tokens)):
        part = ladder(tokens[:cut], block_size=block_size, extras=extras)
        assert whole.startswith(part)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), BLOCK_SIZES, st.data())
def test_one_other_token_changes_its_block_and_all_after(tokens, block_size, data):
    """Equal digests mean an equal history, not just an equal block."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    before = ladder(tokens, block_size=block_size)
    after = ladder(other, block_size=block_size)
    rungs = range(len(before) // DIGEST_BYTES)
    changed = [
        i
        for i in rungs
        if before[i * DIGEST_BYTES :][:DIGEST_BYTES]
        != after[i * DIGEST_BYTES :][:DIGEST_BYTES]
    ]
    assert changed == [i for i in rungs if i >= at // block_size]


def test_what_shapes_a_block_cannot_pass_for_its_tokens():
    """Moving bytes between the extra and the token ids gives another digest."""
    plain = ladder([1, 2], block_size=2)
    extra = ladder([2], block_size=1, extras=[(1).to_bytes(4, "little")])
    assert plain != extra


def test_digests_are_the_same_in_every_process_and_version():
    """Engines of different builds verify each other's leases: the digest is
    part of the protocol, so this value never changes without another version."""
    rungs = ladder([1, 2, 3, 4, 5], block_size=2, extras=[b"salt"])
    assert rungs.hex() == GOLDEN


GOLDEN = "14b5eae02c8e21491450f1b74d729a3dc252a7d09d23a6dbc48119b1da8bcf0f"
