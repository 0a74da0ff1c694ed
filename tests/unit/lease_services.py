"""A prefill engine's lease service, for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvloom_connector.announcements import Announcements
from kvloom_connector.book import LeaseBook
from kvloom_connector.handovers import Handovers
from kvloom_connector.service import EngineIdentity, LeaseService


@contextmanager
def prefilling(
    *, handovers: Handovers | None = None, announcements: Announcements | None = None
) -> Iterator[LeaseService]:
    """Serves what is given on a port of its own; grants no lease."""
    identity = EngineIdentity(
        engine_id="p0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        block_size=4,
    )
    service = LeaseService(
        LeaseBook(max_blocks=0),
        identity,
        host="127.0.0.1",
        port=0,
        handovers=handovers,
        announcements=announcements,
    )
    try:
        yield service
    finally:
        service.close()
