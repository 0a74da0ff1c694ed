"""The fake's prefix cache: what it says is cached is what it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.testing.cache import (
    BlockPool,
    block_digests,
    common_length,
    extra_digest,
)

SIZE = 4
EXTRA = extra_digest(model="m", lora="", cache_salt="")
TOKENS = st.lists(st.integers(0, 2), max_size=40)


def stored(pool: BlockPool, tokens: list[int], extra: bytes = EXTRA) -> list[int]:
    blocks = pool.allocate(-(-len(tokens) // SIZE))
    assert blocks is not None
    for i, block in enumerate(blocks):
        pool.write(block, tokens[i * SIZE : (i + 1) * SIZE])
    for block, digest in zip(blocks, digests(tokens, extra), strict=False):
        pool.publish(block, digest)
    return blocks


def digests(tokens: list[int], extra: bytes = EXTRA) -> list[bytes]:
    return block_digests(tokens, block_size=SIZE, extra=extra)


@given(TOKENS, TOKENS)
def test_cached_tokens_are_the_common_blocks(first: list[int], then: list[int]) -> None:
    """A prompt finds exactly the full blocks that it shares with an earlier one."""
    pool = BlockPool(num_blocks=32, block_size=SIZE)
    pool.release(stored(pool, first))
    found = pool.cached_prefix(digests(then))
    common = common_length(first, then)
    assert len(found) == min(common, len(first) // SIZE * SIZE) // SIZE
    assert [t for block in pool.read(found) for t in block] == then[: len(found) * SIZE]
    pool.check_integrity()


@given(TOKENS.filter(lambda tokens: len(tokens) >= SIZE))
def test_salt_and_lora_part_what_is_equal(tokens: list[int]) -> None:
    """The same tokens under another salt, adapter or model are not cached."""
    pool = BlockPool(num_blocks=32, block_size=SIZE)
    stored(pool, tokens)
    for extra in (
        extra_digest(model="m", lora="", cache_salt="tenant"),
        extra_digest(model="m", lora="adapter", cache_salt=""),
        extra_digest(model="other", lora="", cache_salt=""),
    ):
        assert not pool.cached_prefix(digests(tokens, extra))
    assert pool.cached_prefix(digests(tokens))


def test_the_least_recently_released_block_goes_first() -> None:
    """A conversation's tail is given up before its beginning."""
    pool = BlockPool(num_blocks=4, block_size=SIZE)
    tokens = list(range(3 * SIZE))
    pool.release(stored(pool, tokens))
    assert pool.allocate(2) is not None  # the empty block and the tail
    assert len(pool.cached_prefix(digests(tokens))) == 2


def test_too_few_blocks_take_nothing() -> None:
    """An allocation that fails changes nothing."""
    pool = BlockPool(num_blocks=2, block_size=SIZE)
    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_a_block_cannot_be_released_twice() -> None:
    """A double release is an error, not somebody else's block."""
    pool = BlockPool(num_blocks=1, block_size=SIZE)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Whatever happens, content and index agree and no block is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=12, block_size=SIZE)
        self.held: list[list[int]] = []

    @rule(tokens=TOKENS)
    def store(self, tokens: list[int]) -> None:
        if -(-len(tokens) // SIZE) <= self.pool.num_free:
            self.held.append(stored(self.pool, tokens))

    @rule(tokens=TOKENS)
    def reuse(self, tokens: list[int]) -> None:
        found = self.pool.cached_prefix(digests(tokens))
        read = [t for block in self.pool.read(found) for t in block]
        assert read == tokens[: len(read)]
        self.pool.hold(found)
        self.held.append(found)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            i = data.draw(st.integers(0, len(self.held) - 1))
            self.pool.release(self.held.pop(i))

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_held == len({b for blocks in self.held for b in blocks})


TestPool = PoolMachine.TestCase
