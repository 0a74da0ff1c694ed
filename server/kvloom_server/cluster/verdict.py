"""Judges running engines by what they said: each by itself, and all together; pure."""

from collections.abc import Iterator, Sequence

from kvloom.protocol import PROTOCOL_VERSION, Refused, Welcome

from .doctor import VLLM_SERIES, Finding
from .probe import EngineView, LeaseAnswer, Silence, Trouble

_SAME_KVLOOM = "install the same kvloom beside the engines and the router"
_NOT_LISTENING = (
    "nothing listens there: start the engine with kv_connector_module_path "
    "kvloom_connector.connector, and compare the address with lease_host and "
    "lease_port in its kv_connector_extra_config"
)
_NOT_ANSWERING = (
    "somebody listens there and does not answer us: check that it is the lease "
    "service's port, and that --cluster-key-file has the key of the engine's "
    "cluster_key_file (without one there, leave it out here)"
)


def judge(views: Sequence[EngineView]) -> list[Finding]:
    """What is as it should be, and what is not, with the cure."""
    own = [finding for view in views for finding in _own(view)]
    return [*own, *_together(views)]


def _own(view: EngineView) -> Iterator[Finding]:
    yield Finding(
        what=f"{view.url} serves",
        is_ok=view.health is None,
        detail="" if view.health is None else view.health.reason,
        cure="start that engine or correct its address; its log says why it "
        "does not serve",
    )
    if view.health is None or view.health.status is not None:
        yield _version(view)
        yield _model(view)
    yield _lease(view.url, view.lease)


def _version(view: EngineView) -> Finding:
    is_known = isinstance(view.version, str)
    return Finding(
        what=f"{view.url} is vLLM {VLLM_SERIES}",
        is_ok=isinstance(view.version, str)
        and view.version.startswith(f"{VLLM_SERIES}."),
        detail=_said(view.version),
        cure=f"the connector knows vLLM {VLLM_SERIES} only: install that in the "
        "engine's environment"
        if is_known
        else "check that the address is a vLLM engine's, and no router's",
    )


def _model(view: EngineView) -> Finding:
    is_locked = isinstance(view.model, Trouble) and view.model.status == 401
    return Finding(
        what=f"{view.url} names its model",
        is_ok=isinstance(view.model, str),
        detail=_said(view.model),
        cure="set KVLOOM_UPSTREAM_API_KEY to the engine's --api-key"
        if is_locked
        else "check that the address is a vLLM engine's; its log says what it loaded",
    )


def _said(answer: str | Trouble) -> str:
    return answer.reason if isinstance(answer, Trouble) else answer


def _lease(url: str, answer: LeaseAnswer | None) -> Finding:
    what = f"{url} has kvloom's connector"
    match answer:
        case None:
            return Finding(
                what=what,
                is_ok=False,
                is_needed=False,
                detail="not looked at",
                cure=f"say where its lease service is: "
                f"--engine={url},lease=tcp://host:port",
            )
        case Welcome(version=version):
            return Finding(
                what=what,
                is_ok=version == PROTOCOL_VERSION,
                detail=f"protocol {version}, ours is {PROTOCOL_VERSION}",
                cure=_SAME_KVLOOM,
            )
        case Refused(reason=reason):
            detail = f"{reason}; ours is {PROTOCOL_VERSION}"
            return Finding(what=what, is_ok=False, detail=detail, cure=_SAME_KVLOOM)
        case Silence(is_listening=is_listening):
            return Finding(
                what=what,
                is_ok=False,
                detail="its lease service does not answer",
                cure=_NOT_ANSWERING if is_listening else _NOT_LISTENING,
            )


def _together(views: Sequence[EngineView]) -> Iterator[Finding]:
    yield from _same(
        "vLLM",
        {v.url: _release(v.version) for v in views if isinstance(v.version, str)},
        "install one version everywhere: engines of two do not exchange KV",
    )
    yield from _same(
        "model",
        {v.url: v.model for v in views if isinstance(v.model, str)},
        "start all of them with the same --model and --served-model-name",
    )
    yield from _same(
        "block size",
        {
            v.url: f"{v.lease.block_size} tokens"
            for v in views
            if isinstance(v.lease, Welcome)
        },
        "start all of them with the same --block-size",
    )


def _release(version: str) -> str:
    """Without the build, in which a CPU and a GPU wheel of one release differ."""
    return version.partition("+")[0]


def _same(what: str, told: dict[str, str], cure: str) -> Iterator[Finding]:
    if len(told) < 2:
        return
    values = set(told.values())
    each = ", ".join(f"{value} at {url}" for url, value in told.items())
    yield Finding(
        what=f"the same {what} on all {len(told)} engines",
        is_ok=len(values) == 1,
        detail=values.pop() if len(values) == 1 else each,
        cure=cure,
    )
