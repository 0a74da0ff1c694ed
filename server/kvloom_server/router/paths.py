"""Which paths pass through to an engine, and which never do. Pure.

vLLM has its API and its switches on one port, and guards only some of them with
a key. So what passes is the API, by name; what is not known to be part of it
does not, and what is switches something among the API's own paths does not
either.
"""

import re
from typing import Final

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})

API_PREFIXES: Final = ("/v1/", "/v2/")

API_PATHS: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/generative_scoring",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/version",
    }
)
"""The API's paths of vLLM 0.32 that stand outside a version's prefix."""

SWITCHES: Final = frozenset(
    {
        # Other models than the operator's.
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        # Names its requests, so anybody's.
        "/inference/v1/abort_requests",
        "/abort_requests",
        # Only with VLLM_SERVER_DEV_MODE, but then without any key.
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/release_kv_cache_memory",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/collective_rpc",
        "/server_info",
        "/start_profile",
        "/stop_profile",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/init_weight_transfer_engine",
        "/update_weights",
        "/fault_tolerance/apply",
        # The engine's own page, and its numbers.
        "/metrics",
        "/load",
        "/docs",
        "/redoc",
        # A websocket, which the router has not.
        "/v1/realtime",
        # SageMaker's door to all of the API at once.
        "/invocations",
    }
)
"""Never passed on, whatever the lists above say."""

# Nothing that a client library or an engine would read as another path: no
# empty, `.` or `..` segment, no escape that is left after decoding.
_PLAIN = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~:@+,=-]+)+/?")


def passes(path: str) -> bool:
    """Whether a request for this path, decoded, may go to an engine."""
    if _PLAIN.fullmatch(path) is None:
        return False
    bare = path.rstrip("/")
    if bare in SWITCHES:
        return False
    return bare in API_PATHS or bare.startswith(API_PREFIXES)
