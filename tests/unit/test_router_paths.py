"""What passes through to an engine, and what never does."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.paths import API_PATHS, SWITCHES, passes

PASSING = [
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/score",
    "/v1/audio/transcriptions",
    "/v1/messages/count_tokens",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/models/org/model-7B:tag",
    "/v1/something/new",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/version",
]
REFUSED = [
    "/",
    "/sleep",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "/v1/load_lora_adapter/",
    "/v1/unload_lora_adapter",
    "/metrics",
    "/docs",
    "/invocations",
    "/inference/v1/abort_requests",
    "/inference/v1/anything",
    "/v1",
    "/v1/",
    "/v1/../sleep",
    "/v1/..",
    "/v1/./sleep",
    "/v1//sleep",
    "//sleep",
    "/v1/a/../../sleep",
    "/v1/%2e%2e/sleep",
    "/v1/..\\sleep",
    "/v1/x?y",
    "/v1/x#y",
    "/v1/x y",
    "/v1/x\r\nhost: y",
    "/v1/é",
    "http://elsewhere/v1/x",
    "v1/x",
]


@pytest.mark.parametrize("path", PASSING)
def test_the_api_passes(path: str) -> None:
    """What clients of vLLM use, also what is newer than this router."""
    assert passes(path)


@pytest.mark.parametrize("path", REFUSED)
def test_switches_and_tricks_do_not(path: str) -> None:
    """No way of writing a path gets a client to what is the operator's."""
    assert not passes(path)


@given(st.sampled_from(["/v1/", "/v2/", ""]), st.text("./%\\ab\r\n ;", max_size=12))
def test_what_passes_means_one_path(prefix: str, rest: str) -> None:
    """Nothing passes that somebody on the way would read as another path."""
    path = prefix + rest
    if passes(path):
        assert "//" not in path
        assert not {".", ".."} & set(path.split("/"))
        assert re.fullmatch(r"[\w.~:@+,=/-]+", path, re.ASCII)


def test_every_route_of_the_installed_vllm_is_judged_on_purpose() -> None:
    """A route that this vLLM has is the API's, a switch, or the router's own:
    a new version's routes are looked at before it is supported."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    found = _routes_of_vllm()
    assert "/v1/embeddings" in found or "/v1/rerank" in found
    unknown = {
        path
        for path in found
        if not path.startswith(("/v1/", "/v2/", "/static"))
        and path not in SWITCHES | API_PATHS | KNOWN_CLOSED
    }
    assert not unknown, "judge these in paths.py"
    opened = {path for path in found if passes(path)}
    assert not {p for p in opened if re.search(SUSPICIOUS, p)}


SUSPICIOUS = r"adapter|sleep|reset|rpc|weight|profile|abort|pause|elastic"

KNOWN_CLOSED = frozenset(
    {
        # The router's own, under the same names.
        "/health",
        "/inference/v1/generate",
        # What an orchestrator asks an engine.
        "/ping",
        "/ready",
        "/readyz",
        "/kv_event_sources",
        "/fault_tolerance/status",
        # Training.
        "/finish_weight_update",
        "/get_world_size",
        "/shutdown_weight_transfer_engine",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/weight_checker",
        "/weight_info",
        # Shows the chat template, where the operator asks for it.
        "/tokenizer_info",
    }
)


def _routes_of_vllm() -> set[str]:
    """Paths in the source of the installed vLLM's HTTP servers."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "entrypoints"
    pattern = re.compile(
        r"(?:router\.\w+|add_api_route)\(\s*\"(/[\w/{}]+)\"", re.MULTILINE
    )
    return {
        re.sub(r"\{\w+\}", "x", path)
        for file in folder.rglob("*.py")
        for path in pattern.findall(file.read_text())
    }
