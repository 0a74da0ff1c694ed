"""NIXL's stand-in: engines of one process read each other's KV blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class ReadError(Exception):
    """A read found no such engine, or none that answers."""


class Memory(Protocol):
    """An engine's KV blocks, as others may read them."""

    def read(self, blocks: Sequence[int], /) -> list[tuple[int, ...]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One transfer that took place."""

    source: str
    """Engine ID of the engine that was read."""
    reader: str
    """Engine ID of the engine that read."""
    num_blocks: int


class FakeFabric:
    """Connects the memories of the engines that it is given to.

    Set :attr:`is_cut` to make every read fail.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self.reads: list[Read] = []
        self._memories: dict[str, tuple[Memory, Callable[[str], None]]] = {}

    def join(
        self, engine_id: str, memory: Memory, *, on_read: Callable[[str], None]
    ) -> None:
        """Make an engine's blocks readable; ``on_read`` gets the request's ID
        when its reader needs them no more."""
        self._memories[engine_id] = (memory, on_read)

    def leave(self, engine_id: str) -> None:
        """Take an engine's memory away, as its death does."""
        self._memories.pop(engine_id, None)

    def read(
        self, source: str, blocks: Sequence[int], *, reader: str
    ) -> list[tuple[int, ...]]:
        """The content of another engine's blocks.

        Raises:
            ReadError: the engine is gone, has no such blocks, or the fabric is
                cut.
        """
        if self.is_cut or source not in self._memories:
            raise ReadError(f"engine {source} cannot be read")
        try:
            content = self._memories[source][0].read(blocks)
        except IndexError as error:
            raise ReadError(f"engine {source} has no such blocks") from error
        self.reads.append(Read(source=source, reader=reader, num_blocks=len(blocks)))
        return content

    def done(self, source: str, request_id: str) -> None:
        """Tell an engine that the blocks of its request have been read."""
        if source in self._memories and not self.is_cut:
            self._memories[source][1](request_id)
