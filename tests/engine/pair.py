"""A real pair under test: asked as a user asks, looked at as an operator does."""

import uuid
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
import openai
import zmq
from shelf import Running
from waiting import PATIENCE_S, attempts

from kvloom.protocol import (
    MESSAGES,
    OPS,
    PLAN_HEADER,
    Claim,
    Claimed,
    LeaseRecord,
    Leases,
    ListLeases,
    PlanReport,
    Release,
)

Messages = list[dict[str, Any]]


class Pair:
    """One prefill and one decode engine behind the router."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.model = running.model
        self.prefill, self.decode = running.prefill[0], running.decode[0]
        self.lease_address = running.lease[0]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.http = self._stack.enter_context(httpx.Client(timeout=120))
        self.client = self._stack.enter_context(
            openai.OpenAI(base_url=self.running.base_url, api_key="none", max_retries=0)
        )
        self._context = zmq.Context()
        self._stack.callback(self._context.destroy, linger=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # ── as a user ────────────────────────────────────────────────────────────

    def ask(
        self, messages: Messages, conversation: str | None = None, **body: Any
    ) -> "Answer":
        """One turn through the router, not streamed."""
        headers = {"X-Session-ID": conversation} if conversation else {}
        raw = self.client.chat.completions.with_raw_response.create(
            **self._body(messages, body), extra_headers=headers
        )
        return Answer.of(raw.parse().model_dump(), raw.headers[PLAN_HEADER])

    def stream(
        self, messages: Messages, conversation: str | None = None, **body: Any
    ) -> "Answer":
        """One turn through the router, streamed."""
        headers = {"X-Session-ID": conversation} if conversation else {}
        raw = self.client.chat.completions.with_raw_response.create(
            **self._body(messages, body), stream=True, extra_headers=headers
        )
        return Answer.of_chunks(
            [chunk.model_dump() for chunk in raw.parse()], raw.headers[PLAN_HEADER]
        )

    def _body(self, messages: Messages, body: dict[str, Any]) -> dict[str, Any]:
        extra = {"return_token_ids": True, **body.pop("extra_body", {})}
        common = {"model": self.model, "messages": messages, "temperature": 0}
        return {**common, "max_tokens": 12, **body, "extra_body": extra}

    def oracle(self, messages: Messages, **body: Any) -> list[int]:
        """The token ids that a fresh single engine answers with."""
        extra = body.pop("extra_body", {})
        full = {**self._body(messages, body), **extra, "cache_salt": uuid.uuid4().hex}
        full |= full.pop("extra_body") | {"cache_salt": full["cache_salt"]}
        answer = self.http.post(f"{self.prefill}/v1/chat/completions", json=full)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    # ── as an operator ───────────────────────────────────────────────────────

    def forget(self, url: str | None = None) -> None:
        """Has an engine (prefill) lose its prefix cache."""
        where = f"{url or self.prefill}/reset_prefix_cache"
        for _ in attempts("a reset of the prefix cache"):
            if self.http.post(where).json()["success"]:
                return

    def leases(self) -> list[LeaseRecord]:
        """The decode engine's live leases."""
        reply = self.ask_service(ListLeases())
        assert isinstance(reply, Leases)
        return reply.leases

    def ask_service(self, message: Any) -> Any:
        """One request to the decode engine's lease service."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self.lease_address)
        try:
            op, body = OPS[type(message)], msgspec.msgpack.encode(message)
            dealer.send_multipart([op, b"tag", body])
            assert dealer.poll(1000 * PATIENCE_S), "the lease service is silent"
            op, tag, body = dealer.recv_multipart()
            assert tag == b"tag"
            return msgspec.msgpack.decode(body, type=MESSAGES[op])
        finally:
            dealer.close(0)

    def release_all(self) -> None:
        """Ends every lease."""
        for lease in self.leases():
            self.ask_service(Release(lease_id=lease.lease_id))

    def group_of(self, url: str) -> int:
        """An engine's process group."""
        urls = [*self.running.prefill, *self.running.decode]
        return self.running.pids[urls.index(url)]

    @property
    def side_port(self) -> int:
        """Where NIXL asks the decode engine what it is."""
        message = {"role": "user", "content": "One block of words. " * 20}
        self.ask([message], "side-port-asker")
        lease_id = self.leases()[-1].lease_id
        claim = Claim(lease_id=lease_id, claim_id="probe", digests=b"", timeout_s=5)
        claimed = self.ask_service(claim)
        assert isinstance(claimed, Claimed)
        self.ask_service(Release(lease_id=lease_id, claim_id="probe"))
        return claimed.port

    def tokenize(self, messages: Messages, **body: Any) -> list[int]:
        """A prompt's token ids, by the engine."""
        body = {"model": self.model, "messages": messages, **body}
        answer = self.http.post(f"{self.prefill}/tokenize", json=body)
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    def discard(self, params: dict[str, Any], prompt: list[int]) -> None:
        """Has decode read what a prefill leg left, so that prefill lets it go."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        body |= {"kv_transfer_params": params}
        self.http.post(f"{self.decode}/v1/completions", json=body).raise_for_status()

    def usage(self, url: str) -> float:
        """Share of an engine's blocks that are held."""
        return self.metric(url, "vllm:kv_cache_usage_perc")

    def metric(self, url: str, name: str, *, having: str = "") -> float:
        """The sum of one of an engine's series over its labels."""
        lines = self.http.get(f"{url}/metrics").text.splitlines()
        found = (s for s in lines if s.startswith(f"{name}{{") and having in s)
        return sum(float(line.split()[-1]) for line in found)

    def assert_nothing_is_held(self) -> None:
        """Both engines' blocks are free, and nobody waits."""
        for url in (self.prefill, self.decode):
            for _ in attempts(f"{url} to hold no block"):
                # An idle engine frees what ended at its next step.
                self.step(url)
                if self.usage(url) == 0:
                    break
            assert self.metric(url, "vllm:num_requests_waiting") == 0
            assert self.metric(url, "vllm:num_requests_running") == 0

    def step(self, url: str) -> None:
        """Has an engine run a step."""
        body = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": 1}
        self.http.post(f"{url}/v1/completions", json=body).raise_for_status()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn came back with."""

    text: str | None
    message: dict[str, Any]
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    params: dict[str, Any] | None
    plan: PlanReport

    @classmethod
    def of(cls, body: dict[str, Any], header: str) -> "Answer":
        """From a whole answer."""
        choice = body["choices"][0]
        return cls(
            text=choice["message"]["content"],
            message={
                k: v
                for k, v in choice["message"].items()
                if k in ("role", "content", "tool_calls") and v
            },
            prompt_ids=body["prompt_token_ids"],
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            params=body.get("kv_transfer_params"),
            plan=_plan(header),
        )

    @classmethod
    def of_chunks(cls, chunks: list[dict[str, Any]], header: str) -> "Answer":
        """From a stream's chunks."""
        choices = [c for chunk in chunks for c in chunk["choices"]]
        text = "".join(c["delta"]["content"] or "" for c in choices)
        return cls(
            text=text,
            message={"role": "assistant", "content": text},
            prompt_ids=next(
                c["prompt_token_ids"] for c in chunks if c.get("prompt_token_ids")
            ),
            token_ids=[i for c in choices for i in c.get("token_ids") or ()],
            finish_reason=next(
                c["finish_reason"] for c in choices if c["finish_reason"]
            ),
            params=chunks[-1].get("kv_transfer_params"),
            plan=_plan(header),
        )

    @property
    def history(self) -> list[int]:
        """The conversation's token ids up to this answer's end."""
        return self.prompt_ids + self.token_ids


def _plan(header: str) -> PlanReport:
    report = PlanReport.decode_header(header)
    assert report is not None, f"no plan in {header!r}"
    return report
