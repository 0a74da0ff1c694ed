"""Running engines, looked at and judged: each by itself, and all together."""

import asyncio
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvloom.protocol import PROTOCOL_VERSION, Refused, Welcome
from kvloom.testing import FakeCluster
from kvloom_connector.book import LeaseBook
from kvloom_connector.service import EngineIdentity, LeaseService
from kvloom_server.cluster.doctor import VLLM_SERIES
from kvloom_server.cluster.ports import free_ports
from kvloom_server.cluster.probe import (
    EngineView,
    Silence,
    Trouble,
    greet,
    look_at,
)
from kvloom_server.cluster.verdict import judge
from kvloom_server.settings import EngineSpec

KEY = b"a cluster key of enough bytes"
OTHER = b"another cluster key, as long!"
PATIENCE_S = 20.0
# A service that lets nobody in gives no answer at all; how long to listen for one.
SILENCE_S = 0.3


def answers(server, path, response):
    """Have a fake engine answer on a path of vLLM's that it does not have."""

    async def endpoint(_request):
        return response

    server.engine.app.router.routes.insert(0, Route(path, endpoint))


def version(server, text=f"{VLLM_SERIES}.0"):
    answers(server, "/version", JSONResponse({"version": text}))


def specs(cluster):
    return [
        *(EngineSpec(url=server.url) for server in cluster.prefill),
        *(
            EngineSpec(url=server.url, lease_address=server.lease_address)
            for server in cluster.decode
        ),
    ]


async def findings(cluster, **options):
    views = await look_at(specs(cluster), **{"timeout_s": PATIENCE_S, **options})
    return judge(views)


def lacks(found):
    return [f for f in found if not f.is_ok and f.is_needed]


def test_engines_that_fit_lack_nothing():
    """And what could not be looked at is said, as a note."""

    async def main():
        async with FakeCluster(decode=2) as cluster:
            for server in cluster.servers:
                version(server)
            found = await findings(cluster)
        assert not lacks(found)
        (note,) = (f for f in found if not f.is_ok)
        assert cluster.prefill[0].url in note.what
        assert "lease=tcp://" in note.cure
        shared = [f for f in found if f.what.startswith("the same")]
        assert [f.detail for f in shared] == ["0.32.0", "fake-model", "16 tokens"]

    asyncio.run(main())


def test_engines_that_do_not_fit_each_other_are_named():
    """Another block size and another vLLM: neither would exchange KV."""

    async def main():
        async with (
            FakeCluster(prefill=0) as one,
            FakeCluster(prefill=0, block_size=32, model="other") as other,
        ):
            version(one.decode[0])
            version(other.decode[0], f"{VLLM_SERIES}.1+cpu")
            engines = [*specs(one), *specs(other)]
            found = lacks(judge(await look_at(engines, timeout_s=PATIENCE_S)))
        assert [f.what.split(" on all")[0] for f in found] == [
            "the same vLLM",
            "the same model",
            "the same block size",
        ]
        for finding in found:
            assert one.decode[0].url in finding.detail
            assert other.decode[0].url in finding.detail
            assert finding.cure

    asyncio.run(main())


def test_an_engine_that_is_not_there_is_one_lack():
    """Not four; and its lease service is another matter."""

    async def main():
        async with FakeCluster(prefill=0) as cluster:
            gone = EngineSpec(
                url=f"http://127.0.0.1:{free_port()}",
                lease_address=cluster.decode[0].lease_address,
            )
            found = judge(await look_at([gone], timeout_s=PATIENCE_S))
        (lack,) = lacks(found)
        assert lack.what == f"{gone.url} serves"
        assert [f.is_ok for f in found] == [False, True]

    asyncio.run(main())


def test_a_server_that_is_no_vllm_is_told_from_one():
    """A wrong port that answers all the same."""

    async def main():
        async with FakeCluster(prefill=0) as cluster:
            server = cluster.decode[0]
            answers(server, "/version", Response("<html>"))
            answers(server, "/v1/models", JSONResponse({"data": []}))
            found = lacks(await findings(cluster))
        assert [f.detail for f in found] == [
            "its answer is not vLLM's",
            "it serves no model",
        ]

    asyncio.run(main())


def test_another_vllm_is_a_lack():
    """The connector knows one series."""

    async def main():
        async with FakeCluster(prefill=0) as cluster:
            version(cluster.decode[0], "0.31.2")
            (lack,) = lacks(await findings(cluster))
        assert lack.detail == "0.31.2"
        assert VLLM_SERIES in lack.cure

    asyncio.run(main())


def test_an_engine_that_asks_for_an_api_key_is_said_how_to_ask():
    """The variable that the router reads, too; with it all is well."""

    async def main():
        async with FakeCluster(prefill=0) as cluster:
            server = cluster.decode[0]
            version(server)
            locked = JSONResponse({"error": "Unauthorized"}, status_code=401)
            answers(server, "/v1/models", locked)
            (lack,) = lacks(await findings(cluster, api_key="sesame"))
            assert "KVLOOM_UPSTREAM_API_KEY" in lack.cure
            (asked,) = {
                request.headers.get("authorization")
                for request in server.engine.received("/health")
            }
            assert asked == "Bearer sesame"

    asyncio.run(main())


def test_a_lease_service_that_is_not_there_is_a_connector_that_is_not_loaded():
    """The cure is what to load, and where the address is set."""

    async def main():
        port = free_port()
        return await greet(
            f"tcp://127.0.0.1:{port}", cluster_key=None, timeout_s=SILENCE_S
        )

    answer = asyncio.run(main())
    assert answer == Silence(is_listening=False)
    (lack,) = lacks(judge([view(lease=answer)]))
    assert "kv_connector_module_path" in lack.cure


def test_a_lease_service_that_is_mute_is_told_from_one_that_is_not_there():
    """Somebody listens: the port or the key is wrong, or the engine hangs."""

    async def main():
        async with FakeCluster(prefill=0) as cluster:
            cluster.decode[0].engine.leases.is_mute = True
            return await greet(
                cluster.decode[0].lease_address, cluster_key=None, timeout_s=SILENCE_S
            )

    answer = asyncio.run(main())
    assert answer == Silence(is_listening=True)
    (lack,) = lacks(judge([view(lease=answer)]))
    assert "--cluster-key-file" in lack.cure


@pytest.mark.parametrize("address", ["tcp://nowhere", "tcp://127.0.0.1:x", "ipc:///no"])
def test_an_address_that_can_be_none_is_silence(address):
    """No traceback for a typing mistake."""
    answer = asyncio.run(greet(address, cluster_key=None, timeout_s=SILENCE_S))
    assert answer == Silence(is_listening=False)


@contextmanager
def locked_service():
    """A real lease service that asks for the key."""
    identity = EngineIdentity(
        engine_id="d0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        block_size=4,
    )
    service = LeaseService(
        LeaseBook(max_blocks=10), identity, host="127.0.0.1", port=0, cluster_key=KEY
    )
    try:
        yield service.address
    finally:
        service.close()


def test_a_locked_lease_service_answers_who_has_the_key():
    """As it does to prefill engines and routers."""
    with locked_service() as address:
        answer = asyncio.run(greet(address, cluster_key=KEY, timeout_s=PATIENCE_S))
    assert isinstance(answer, Welcome)
    assert answer.block_size == 4


@pytest.mark.parametrize("key", [None, OTHER])
def test_a_locked_lease_service_is_silent_to_others(key):
    """Which reads as a question of the key."""
    with locked_service() as address:
        answer = asyncio.run(greet(address, cluster_key=key, timeout_s=SILENCE_S))
    assert answer == Silence(is_listening=True)


def free_port():
    (port,) = free_ports(1)
    return port


def welcome(block_size=16, protocol=PROTOCOL_VERSION):
    return Welcome(version=protocol, engine_id="e", boot_id="b", block_size=block_size)


def view(url="http://e:1", release="0.32.0", model="m", lease=None):
    return EngineView(url=url, health=None, version=release, model=model, lease=lease)


@pytest.mark.parametrize(
    "answer", [welcome(protocol=PROTOCOL_VERSION + 1), Refused(reason="version 7")]
)
def test_another_protocol_is_a_lack(answer):
    """Of whichever side notices."""
    (lack,) = lacks(judge([view(lease=answer)]))
    assert "same kvloom" in lack.cure


def test_a_build_is_no_other_version():
    """A CPU and a GPU wheel of one release."""
    views = [view("http://a:1", "0.32.0+cpu"), view("http://b:1", "0.32.0")]
    assert not lacks(judge(views))


troubles = st.builds(
    Trouble, reason=st.text(), status=st.none() | st.integers(400, 599)
)
views = st.builds(
    EngineView,
    url=st.sampled_from(["http://a:1", "http://b:1", "http://c:1"]),
    health=st.none() | troubles,
    version=st.sampled_from(["0.32.0", "0.32.1", "0.31.0"]) | troubles,
    model=st.sampled_from(["m", "n"]) | troubles,
    lease=st.none()
    | st.builds(Silence, is_listening=st.booleans())
    | st.builds(Refused, reason=st.text())
    | st.builds(welcome, block_size=st.sampled_from([16, 32])),
)


@given(st.lists(views, max_size=4, unique_by=lambda v: v.url))
def test_every_lack_has_a_cure(seen):
    """Whatever engines say; and none lacks anything together that agrees."""
    found = judge(seen)
    assert all(f.cure for f in found if not f.is_ok)
    for one in seen:
        assert any(one.url in f.what for f in found)
    told = {v.version for v in seen if isinstance(v.version, str)}
    vllm = [f for f in found if f.what.startswith("the same vLLM")]
    assert [f.is_ok for f in vllm] in ([], [len(told) == 1])
