"""Times decode's lease book with 10 to 100,000 leases in it.

    python benchmarks/lease_book.py --json docs/results/lease_book.jsonl

The other half of ``kvloom bench pressure``, which measures the router's map: a
server may not import the connector, so this is a script.
"""

import argparse
import gc
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console

from kvloom_connector.book import LeaseBook
from kvloom_connector.lease import Lease
from kvloom_server.bench.environment import environment
from kvloom_server.bench.layouts import PRESSURE
from kvloom_server.bench.pressure import ROUNDS, SIZES
from kvloom_server.bench.results import Results
from kvloom_server.bench.tables import table

NUM_TOKENS: Final = 512
"""Of a lease: 100,000 of them must fit into this process."""
BLOCK_SIZE: Final = 16
NOW: Final = 1_000_000.0
SAMPLES: Final = 500


def lease(number: int) -> Lease:
    """A lease with blocks of its own, and the sizes of a real one."""
    blocks = NUM_TOKENS // BLOCK_SIZE
    return Lease(
        lease_id=f"{number:032x}",
        num_tokens=NUM_TOKENS,
        blocks=(tuple(range(number * blocks, (number + 1) * blocks)),),
        tokens=array("i", range(NUM_TOKENS)),
        digests=bytes(blocks * 16),
        extras=(),
        deadline=NOW + 480 + number / 1000,
    )


def filled(size: int) -> LeaseBook:
    """A book that is full with ``size`` leases."""
    book = LeaseBook(max_blocks=size * (NUM_TOKENS // BLOCK_SIZE))
    for number in range(size):
        book.grant(lease(number), now=NOW)
    book.take_events()
    return book


def measure(results: Results, size: int, *, seed: int) -> None:
    """One size of the book."""
    results.add(
        {
            "row": "pressure_memory",
            "what": "lease book",
            "conversations": size,
            "bytes": (_held_bytes(size) - _held_bytes(1)) / (size - 1),
        }
    )
    chance = Random(seed)

    def claimed(book: LeaseBook, number: int) -> None:
        book.claim(names[number], "c", now=NOW, timeout_s=10.0)
        book.unclaim(names[number], "c")

    def granted(book: LeaseBook, number: int) -> None:
        book.grant(new[number], now=NOW)

    def renewed(book: LeaseBook, number: int) -> None:
        book.renew(names[number], now=NOW, ttl_s=480.0)

    def expired(book: LeaseBook, _number: int) -> None:
        book.expire(now=NOW)

    book = filled(size)
    for repeat in range(ROUNDS):
        first = size + repeat * SAMPLES
        alive = [record.lease_id for record in book.records()]
        names = [chance.choice(alive) for _ in range(SAMPLES)]
        new = [lease(first + number) for number in range(SAMPLES)]
        operations: dict[str, Callable[[LeaseBook, int], None]] = {
            "a claim, and its end": claimed,
            "a renewal": renewed,
            "looking for expired ones": expired,
            "a grant into a full book": granted,
        }
        for operation, do in operations.items():
            began = time.process_time()
            for number in range(SAMPLES):
                do(book, number)
            us = (time.process_time() - began) / SAMPLES * 1e6
            book.take_events()
            book.take_freed()
            results.add(
                {
                    "row": "pressure",
                    "what": "lease book",
                    "operation": operation,
                    "conversations": size,
                    "us": us,
                    "repeat": repeat,
                }
            )


def _held_bytes(size: int) -> int:
    gc.collect()
    tracemalloc.start()
    book = filled(size)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(book) == size
    return held


def main(argv: Sequence[str]) -> None:
    """Measure, write the file, show the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="up to 1,000 leases")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    console = Console()
    where = {**environment(argv), "command": "python benchmarks/lease_book.py"}
    with Results(options.json, where) as results:
        for size in SIZES[:3] if options.quick else SIZES:
            console.print(f"{size:,} leases", style="dim")
            measure(results, size, seed=options.seed)
    for layout in PRESSURE:
        console.print(table(results.rows, layout))


if __name__ == "__main__":
    main(sys.argv[1:])
