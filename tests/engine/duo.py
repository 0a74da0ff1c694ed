"""Two bare engines, asked without a router: what only the connectors decide."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
import zmq
from cores import frozen
from waiting import PATIENCE_S, attempts

from kvloom.protocol import (
    MESSAGES,
    OPS,
    LeaseRecord,
    LeaseRef,
    Leases,
    ListLeases,
    PrefillOutcome,
    PromptRef,
    Release,
    decode_params,
    outcome_of,
    prefill_params,
)
from kvloom_server.cluster import model as bundled
from kvloom_server.cluster.engine_args import (
    EngineSlot,
    ModelChoice,
    Recipe,
    Role,
    engine_command,
    engine_environment,
)
from kvloom_server.cluster.launch import plan_slots
from kvloom_server.cluster.machine import detect_device

LEASH = (sys.executable, "-m", "kvloom_server.cluster.leash")
START_LIMIT_S = 300.0
SMALL = ("--num-gpu-blocks-override=110", "--max-model-len=3200")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn, through both engines."""

    lease_id: str
    prompt: list[int]
    output: list[int]
    message: dict[str, Any]
    finish_reason: str
    outcome: PrefillOutcome

    @property
    def history(self) -> list[int]:
        """The conversation's token ids up to this turn's end."""
        return self.prompt + self.output


class Duo:
    """A prefill and a decode engine of the bundled model, in float32."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill_args: tuple[str, ...] = (),
        decode_args: tuple[str, ...] = SMALL,
        extra_config: dict[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        device = detect_device()
        self._prefill, self._decode = plan_slots(
            num_prefill=1, num_decode=1, device=device
        )
        self._recipe = Recipe(
            model=ModelChoice(
                path=str(bundled.prepare()),
                served_name="small",
                chat_template=str(bundled.chat_template()),
                is_bundled=True,
            ),
            device=device,
            has_dev_endpoints=True,
            engine_args=("--dtype=float32",),
            prefill_args=prefill_args,
            decode_args=decode_args,
            extra_config=extra_config or {},
        )
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._http = httpx.Client(timeout=120)
        self._context = zmq.Context()

    # ── life ─────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        try:
            for slot in (self._prefill, self._decode):
                self._start(slot)
            for slot in (self._prefill, self._decode):
                self._await_health(slot)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for process in self._processes.values():
            _kill(process)
        self._http.close()
        self._context.destroy(linger=0)

    def _start(self, slot: EngineSlot) -> None:
        with (self._folder / f"{slot.name}.log").open("ab") as log:
            self._processes[slot.name] = subprocess.Popen(
                [*LEASH, str(os.getpid()), *engine_command(slot, self._recipe)],
                env={
                    **os.environ,
                    **engine_environment(slot, self._recipe),
                    "TMPDIR": str(self._folder),
                    "VLLM_RPC_BASE_PATH": str(self._folder),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_health(self, slot: EngineSlot) -> None:
        for _ in attempts(f"{slot.name} to serve", limit_s=START_LIMIT_S):
            assert self._processes[slot.name].poll() is None, self.log(slot.role)
            try:
                if self._http.get(f"{slot.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                continue

    def log(self, role: Role) -> str:
        """What an engine printed."""
        slot = self._slot(role)
        return (self._folder / f"{slot.name}.log").read_text()

    def _slot(self, role: Role) -> EngineSlot:
        return self._prefill if role is Role.PREFILL else self._decode

    def kill(self, role: Role) -> None:
        """An engine dies, without a word."""
        _kill(self._processes[self._slot(role).name])

    def restart(self, role: Role) -> None:
        """An engine dies and comes back at the same address, remembering nothing."""
        self.kill(role)
        self._start(self._slot(role))
        self._await_health(self._slot(role))

    def frozen(self, role: Role) -> AbstractContextManager[None]:
        """An engine's core stands still for the time of the block."""
        return frozen(self._processes[self._slot(role).name].pid)

    def member(self, role: Role) -> str:
        """An engine as `kvloom serve` takes it."""
        slot = self._slot(role)
        return f"{slot.url},lease={slot.lease_address}"

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that belongs to these engines."""
        return {**os.environ, "TMPDIR": str(self._folder)}

    # ── asking ───────────────────────────────────────────────────────────────

    def ref(self, lease_id: str) -> LeaseRef:
        """Where a lease of the decode engine is."""
        return LeaseRef(lease_id=lease_id, address=self._decode.lease_address)

    def turn(
        self,
        messages: list[dict[str, Any]],
        *,
        lease: LeaseRef | None = None,
        **body: Any,
    ) -> Turn:
        """One turn: prefill's leg, then decode's."""
        prompt, handed = self.prefill(messages, lease=lease, **body)
        turn_id = uuid.uuid4().hex
        answer = self.ask(
            Role.DECODE,
            messages,
            params=decode_params(handed, turn_id=turn_id),
            **body,
        )
        return self._turn(turn_id, prompt, handed, answer)

    def _turn(
        self,
        turn_id: str,
        prompt: list[int],
        handed: dict[str, Any],
        answer: dict[str, Any],
    ) -> Turn:
        outcome = outcome_of(handed)
        assert outcome is not None
        choice = answer["choices"][0]
        assert answer["prompt_token_ids"] == prompt
        return Turn(
            lease_id=turn_id,
            prompt=prompt,
            output=choice["token_ids"],
            message={
                k: v for k, v in choice["message"].items() if k in _REPLAYED and v
            },
            finish_reason=choice["finish_reason"],
            outcome=outcome,
        )

    def prompt_ref(self, name: str) -> PromptRef:
        """Where decode asks for a prompt that prefill is computing."""
        return PromptRef(name=name, address=self._prefill.lease_address)

    def turn_at_once(
        self, messages: list[dict[str, Any]], *, lease: LeaseRef | None = None
    ) -> Turn:
        """One turn whose legs go out side by side: prefill tells decode."""
        name = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self.prefill, messages, lease=lease, announce_as=name)
            params = decode_params(None, turn_id=name, awaited=self.prompt_ref(name))
            answer = self.ask(Role.DECODE, messages, params=params)
            prompt, handed = pending.result()
        return self._turn(name, prompt, handed, answer)

    def prefill(
        self,
        messages: list[dict[str, Any]],
        *,
        lease: LeaseRef | None = None,
        announce_as: str | None = None,
        **body: Any,
    ) -> tuple[list[int], dict[str, Any]]:
        """The prompt's token ids, and what prefill hands over."""
        one = {k: v for k, v in body.items() if k not in ("stop", "max_tokens")}
        if "tool_choice" in one:
            one["tool_choice"] = "none"
        answer = self.ask(
            Role.PREFILL,
            messages,
            params=prefill_params(lease, announce_as=announce_as),
            max_tokens=1,
            **one,
        )
        return answer["prompt_token_ids"], answer["kv_transfer_params"]

    def ask(
        self,
        role: Role,
        messages: list[dict[str, Any]],
        *,
        params: dict[str, Any] | None = None,
        limit_s: float = 120,
        **body: Any,
    ) -> dict[str, Any]:
        """One request to one engine; its client leaves after ``limit_s``."""
        full = {
            "model": "small",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 12,
            "return_token_ids": True,
            "kv_transfer_params": params,
            **body,
        }
        url = f"{self._slot(role).url}/v1/chat/completions"
        answer = self._http.post(url, json=full, timeout=limit_s)
        assert answer.status_code == 200, answer.text
        loaded: dict[str, Any] = answer.json()
        return loaded

    def fill(self, role: Role, *, num_tokens: int = 3180) -> None:
        """Has a small engine write over every block that it can get."""
        prompt = random.choices(range(300, 20_000), k=num_tokens)
        body = {"model": "small", "prompt": prompt, "max_tokens": 1}
        url = f"{self._slot(role).url}/v1/completions"
        self._http.post(url, json=body).raise_for_status()

    def abort(
        self, messages: list[dict[str, Any]], **body: Any
    ) -> tuple[str, list[int]]:
        """A turn whose client leaves at the first token: its lease's name, and its
        prompt."""
        prompt, handed = self.prefill(messages, **body)
        turn_id = uuid.uuid4().hex
        full = {
            "model": "small",
            "messages": messages,
            "max_tokens": 600,
            "ignore_eos": True,
            "stream": True,
            "kv_transfer_params": decode_params(handed, turn_id=turn_id),
            **body,
        }
        url = f"{self._decode.url}/v1/chat/completions"
        with self._http.stream("POST", url, json=full) as stream:
            next(stream.iter_lines())
        for _ in attempts("decode to drop the request"):
            if self.metric(Role.DECODE, "vllm:num_requests_running") == 0:
                return turn_id, prompt
        raise AssertionError

    def oracle(self, messages: list[dict[str, Any]], **body: Any) -> list[int]:
        """What a fresh single engine answers."""
        body = {**body, "cache_salt": uuid.uuid4().hex}
        answer = self.ask(Role.PREFILL, messages, **body)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    # ── looking ──────────────────────────────────────────────────────────────

    def forget(self, role: Role = Role.PREFILL) -> None:
        """An engine loses its prefix cache."""
        url = f"{self._slot(role).url}/reset_prefix_cache"
        for _ in attempts("a reset of the prefix cache"):
            if self._http.post(url).json()["success"]:
                return

    def lease_service(self, message: Any) -> Any:
        """One request to the decode engine's lease service."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._decode.lease_address)
            body = msgspec.msgpack.encode(message)
            dealer.send_multipart([OPS[type(message)], b"", body])
            assert dealer.poll(int(1000 * PATIENCE_S)), "the lease service is silent"
            op, _, reply = dealer.recv_multipart()
            return msgspec.msgpack.decode(reply, type=MESSAGES[op])

    def leases(self) -> dict[str, LeaseRecord]:
        """The decode engine's live leases, by name."""
        reply = self.lease_service(ListLeases())
        assert isinstance(reply, Leases)
        return {record.lease_id: record for record in reply.leases}

    def metric(self, role: Role, name: str) -> float:
        """The sum of one of an engine's series over its labels."""
        lines = self._http.get(f"{self._slot(role).url}/metrics").text.splitlines()
        return sum(float(s.split()[-1]) for s in lines if s.startswith(f"{name}{{"))

    def assert_nothing_is_held(self) -> None:
        """Every lease can be released, and then every block is free."""
        for lease_id in self.leases():
            self.lease_service(Release(lease_id=lease_id))
        for role in Role:
            for _ in attempts(f"{role} to hold no block"):
                # An idle engine frees what ended at its next step.
                self.ask(role, [{"role": "user", "content": "x"}], max_tokens=1)
                if self.metric(role, "vllm:kv_cache_usage_perc") == 0:
                    break
            assert self.metric(role, "vllm:num_requests_waiting") == 0
        assert self.leases() == {}


_REPLAYED = ("role", "content", "tool_calls")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
