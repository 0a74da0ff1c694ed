"""What the router says of its own size and of its engines."""

import gc
import tracemalloc

from prometheus_client import CollectorRegistry, generate_latest

from kvloom.protocol import LeaseEvent, LeaseState
from kvloom_server.router.census import Census
from kvloom_server.router.directory import Directory
from kvloom_server.router.engines import Engines
from kvloom_server.settings import EngineSpec

COUNT = 2000


class NobodyThere:
    """An upstream that is never asked."""

    async def send(self, request):
        raise AssertionError(request)


def filled(directory, *, with_leases):
    for number in range(COUNT):
        tag = number.to_bytes(8, "big")
        directory.began(tag, prefill="p0", decode="d0", now=float(number))
        if with_leases:
            event = LeaseEvent(
                seq=number,
                lease_id=tag.hex() + "0" * 16,
                state=LeaseState.GRANTED,
                num_tokens=1000 + number,
                deadline_unix=1e9 + number,
            )
            directory.apply("d0", event, now=float(number))


def measured(*, with_leases):
    """Bytes that the map really takes, and what it says."""
    gc.collect()
    tracemalloc.start()
    try:
        directory = Directory(max_conversations=COUNT, idle_s=1e9)
        filled(directory, with_leases=with_leases)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], directory.num_bytes
    finally:
        tracemalloc.stop()


def test_the_map_takes_no_more_than_it_says():
    """And below two kilobytes a conversation, its lease included."""
    for with_leases in (False, True):
        real, said = measured(with_leases=with_leases)
        assert real <= said, (real / COUNT, said / COUNT)
        assert said / COUNT < 2048


def test_each_engine_is_in_one_state():
    """And has a line for every state, so that a sum over them is one."""
    engines = Engines(
        prefill=[EngineSpec(url="http://p:1")],
        decode=[EngineSpec(url="http://d:1"), EngineSpec(url="http://d:2")],
        upstream=NobodyThere(),
        health_interval_s=1,
        health_timeout_s=1,
    )
    directory = Directory(max_conversations=COUNT, idle_s=1e9)
    filled(directory, with_leases=True)
    registry = CollectorRegistry()
    registry.register(Census(engines, directory))
    page = generate_latest(registry).decode()
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        start = f'kvloom_upstream_state{{engine="{name}",role="{role}",'
        values = [x.split()[-1] for x in page.splitlines() if x.startswith(start)]
        assert sorted(values)[-1] == "1.0"
        assert values.count("1.0") == 1
    assert f'kvloom_leases{{engine="d0"}} {float(COUNT)}' in page
    assert 'kvloom_leases{engine="d1"} 0.0' in page
    assert f"kvloom_conversations {float(COUNT)}" in page
