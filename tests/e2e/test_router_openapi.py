"""The router's description of itself is true."""

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from e2e.test_router_stage import staged
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvloom.protocol import (
    CONVERSATION_ID_PATTERN,
    EXPECTED_RETURN_HEADER,
    FINAL_TURN_HEADER,
    HANDLE_HEADER,
    ReturnMode,
)
from kvloom_server.router import compose
from kvloom_server.router.api import Api


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A router in front of fakes, in a thread of its own."""
    ready: Future[str] = Future()
    stop = threading.Event()

    async def serve() -> None:
        async with staged(settings={"handle_wait_s": 1.0}) as stage:
            ready.set_result(stage.router.url)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield ready.result(timeout=60)
    stop.set()
    thread.join()


DOCUMENT = Path(compose.__file__).with_name("openapi.json")
UNTRIED = r"^/kvloom/(engines|events)"
"""Not called at random: what changes the fleet that the others need, or would send
it to hosts of anybody's, and a stream that does not end. Their own tests do that
(``test_router_fleet.py``, ``test_router_operator.py``)."""

schema = schemathesis.openapi.from_path(DOCUMENT).exclude(path_regex=UNTRIED)


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_every_answer_is_as_described(case: Any, url: str) -> None:
    """Requests as described, and others, get the answers that are described:
    never a 500, always an error of the API's own shape."""
    case.call_and_validate(
        base_url=url,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
        timeout=60,
    )


def test_it_describes_what_is_served(url: str) -> None:
    """Every endpoint of the router's own, with the protocol's own words."""
    document = httpx.get(f"{url}/openapi.json", timeout=30).json()
    own = {"/v1/models", "/health", "/metrics", "/openapi.json", *Api}
    own |= {"/kvloom", "/kvloom/events", "/kvloom/snapshot", "/kvloom/engines"}
    assert own <= document["paths"].keys()
    parameters = document["components"]["parameters"]
    assert parameters["Session"]["schema"]["pattern"] == f"^{CONVERSATION_ID_PATTERN}$"
    assert set(parameters["ReturnMode"]["schema"]["enum"]) == set(ReturnMode)
    assert parameters["Handle"]["name"] == HANDLE_HEADER
    assert parameters["FinalTurn"]["name"] == FINAL_TURN_HEADER
    assert parameters["ExpectedReturn"]["name"] == EXPECTED_RETURN_HEADER
    assert re.compile(parameters["Handle"]["schema"]["pattern"])


def test_a_form_is_refused_as_described(url: str) -> None:
    """Engines read JSON; who sends a form is told so, by a status that the
    description has."""
    answer = httpx.post(f"{url}/v1/embeddings", data={"input": "x"}, timeout=30)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    document = httpx.get(f"{url}/openapi.json", timeout=30).json()
    assert "415" in document["paths"]["/v1/embeddings"]["post"]["responses"]
