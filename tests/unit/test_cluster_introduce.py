"""The first requests to a cluster's engines, on fake ones."""

import asyncio
from urllib.parse import urlsplit

import pytest
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvloom.testing import FakeCluster
from kvloom_server.cluster.engine_args import EngineSlot, Role
from kvloom_server.cluster.flags import Ranks
from kvloom_server.cluster.introduce import introduce, served_model
from kvloom_server.cluster.launch import ClusterError

COMPLETIONS = "/v1/completions"


def slots_of(cluster, **decode):
    servers = [(Role.PREFILL, server) for server in cluster.prefill]
    servers += [(Role.DECODE, server) for server in cluster.decode]
    return [
        EngineSlot(
            name=f"{role[0]}{number}",
            role=role,
            http_port=urlsplit(server.url).port,
            side_port=1,
            lease_port=urlsplit(server.lease_address).port,
            **(decode if role is Role.DECODE else {}),
        )
        for number, (role, server) in enumerate(servers)
    ]


def test_engines_that_met_have_returned_tokens():
    """The model's name is theirs; the exchange was real."""

    async def main():
        async with FakeCluster() as cluster:
            slots = slots_of(cluster)
            model = await served_model(slots[0])
            (met,) = await introduce(slots, model=model, is_returning=True)
            assert (met.prefill, met.decode) == ("p0", "d1")
            assert met.num_returned > 0
            (server,) = cluster.decode
            for request in server.engine.received(COMPLETIONS):
                assert "x-data-parallel-rank" not in request.headers

    asyncio.run(main())


def test_prefill_meets_every_rank_of_a_data_parallel_server():
    """Each request says which rank is meant."""

    async def main():
        async with FakeCluster() as cluster:
            slots = slots_of(cluster, ranks=Ranks(count=2))
            met = await introduce(slots, model="fake-model", is_returning=False)
            assert [one.decode for one in met] == ["d1#0", "d1#1"]
            (server,) = cluster.decode
            asked = server.engine.received(COMPLETIONS)
            assert [r.headers["x-data-parallel-rank"] for r in asked] == ["0", "1"]

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 500])
def test_an_engine_that_names_no_model_is_told_of(status):
    """Which, and what to do; not a name that is not in its answer."""

    async def main():
        async with FakeCluster() as cluster:
            (server,) = cluster.prefill

            async def refuse(_request):
                return JSONResponse({"error": "no"}, status_code=status)

            server.engine.app.router.routes.insert(0, Route("/v1/models", refuse))
            with pytest.raises(ClusterError, match="engine p0 ") as caught:
                await served_model(slots_of(cluster)[0], api_key="sesame")
            assert ("KVLOOM_UPSTREAM_API_KEY" in str(caught.value)) == (status == 401)
            assert "sesame" not in str(caught.value)

    asyncio.run(main())
