"""A bounded pool of KV blocks with a real prefix index.

A block stores the token ids that its KV was computed from, so whoever reads it
reads what is there, not what ought to be. Cached tokens are found, not claimed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvloom.protocol import DIGEST_BYTES

from .tokens import pack_ids


def extra_digest(*, model: str, lora: str, cache_salt: str) -> bytes:
    """Digest of what shapes KV besides the token ids (16 bytes)."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"fake-extra")
    for part in (model, lora, cache_salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_digests(
    token_ids: Sequence[int], *, block_size: int, extra: bytes
) -> list[bytes]:
    """A digest for each full block, chained over all blocks before it."""
    digests: list[bytes] = []
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = hashlib.blake2b(parent + extra, digest_size=DIGEST_BYTES)
        digest.update(pack_ids(token_ids[start : start + block_size]))
        parent = digest.digest()
        digests.append(parent)
    return digests


def common_length(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Length of the longest common prefix."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return min(len(ours), len(theirs))


@dataclass(slots=True, kw_only=True)
class _Block:
    tokens: tuple[int, ...] = ()
    references: int = 0
    digest: bytes | None = None
    """Under which the prefix index knows it."""


@dataclass(slots=True, kw_only=True, repr=False)
class BlockPool:
    """KV blocks, who holds them, and the index of what they hold.

    A block is *held* while it has references. Blocks without any keep their
    content and stay in the index until they are needed: least recently released
    first.
    """

    num_blocks: int
    block_size: int
    _blocks: list[_Block] = field(init=False)
    _index: dict[bytes, int] = field(init=False, default_factory=dict)
    _free: OrderedDict[int, None] = field(init=False)

    def __post_init__(self) -> None:
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        self._free = OrderedDict.fromkeys(range(self.num_blocks))

    def __repr__(self) -> str:
        return (
            f"BlockPool({self.num_held} of {self.num_blocks} blocks held, "
            f"{len(self._index)} cached)"
        )

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def cached_prefix(self, digests: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix; changes nothing."""
        found: list[int] = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for i in blocks:
            self._blocks[i].references += 1
            self._free.pop(i, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block; a prefix outlives its tail."""
        for i in reversed(blocks):
            block = self._blocks[i]
            if block.references < 1:
                raise ValueError(f"block {i} is released more often than it was held")
            block.references -= 1
            if block.references == 0:
                self._free[i] = None

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Empty blocks, held once each, or ``None`` when there are too few."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for i in taken:
            self._forget(i)
            self._blocks[i] = _Block(references=1)
        return taken

    def write(self, block: int, token_ids: Sequence[int]) -> None:
        """Store the KV of ``token_ids`` as the block's content."""
        if len(token_ids) > self.block_size:
            raise ValueError(f"{len(token_ids)} tokens do not fit one block")
        self._blocks[block].tokens = tuple(token_ids)

    def read(self, blocks: Iterable[int]) -> list[tuple[int, ...]]:
        """What each block holds."""
        return [self._blocks[i].tokens for i in blocks]

    def publish(self, block: int, digest: bytes) -> None:
        """Let later prompts find a full block; the first one known stays."""
        if digest not in self._index and self._blocks[block].digest is None:
            self._index[digest] = block
            self._blocks[block].digest = digest

    def forget(self) -> None:
        """Empty the prefix index; held blocks stay held."""
        for i in range(self.num_blocks):
            self._forget(i)

    def _forget(self, block: int) -> None:
        digest, self._blocks[block].digest = self._blocks[block].digest, None
        if digest is not None:
            del self._index[digest]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the pool contradicts itself."""
        for i, block in enumerate(self._blocks):
            assert block.references >= 0, f"block {i} owes references"
            assert (block.references == 0) == (i in self._free), f"block {i} is lost"
            if block.digest is not None:
                assert self._index[block.digest] == i, f"block {i} is misfiled"
        known = sum(block.digest is not None for block in self._blocks)
        assert known == len(self._index), "the index has blocks of its own"
