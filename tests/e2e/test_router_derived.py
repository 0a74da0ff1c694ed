"""Clients that name no conversation: reuse all the same, and nobody's words."""

from typing import Any

import httpx
import pytest
from e2e.test_router_stage import CHAT, MODEL, Stage, fresh, opening, staged

from kvloom.protocol import PLAN_HEADER, PlanReport

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ask(stage: Stage, messages: list[Any], **headers: str) -> tuple[Any, Any]:
    """A turn as a plain client has it: the report, and what was said. The
    answer is that of a fresh engine."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 40}
    stage.cluster.prefill[0].engine.lose_cache()
    answer: httpx.Response = await stage.http.post(
        stage.router.url + CHAT, json=body, headers=headers
    )
    assert answer.status_code == 200
    message = answer.json()["choices"][0]["message"]
    assert message == (await fresh(CHAT, body))["choices"][0]["message"]
    return PlanReport.decode_header(answer.headers[PLAN_HEADER]), message


def on(messages: list[Any], said: Any, text: str = "and then? ") -> list[Any]:
    answer = {"role": "assistant", "content": said["content"]}
    return [*messages, answer, {"role": "user", "content": text * 10}]


async def test_a_client_without_any_header_gets_reuse() -> None:
    """An unmodified client's loop starts every turn from the cache."""
    async with staged() as stage:
        messages, covered = opening(), 0
        for number in range(4):
            report, said = await ask(stage, messages)
            if number:
                assert (report.plan, report.reason) == ("return", "lease_held")
                assert report.returned_tokens >= covered - 1
            covered = report.prompt_tokens
            messages = on(messages, said)
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: len(decode.leases.book) == 1)


async def test_an_id_that_is_new_each_time_is_no_name() -> None:
    """Ids of requests do not keep a conversation apart from itself."""
    async with staged() as stage:
        _, said = await ask(stage, opening(), **{"X-Request-ID": "one"})
        messages = on(opening(), said)
        report, _ = await ask(stage, messages, **{"X-Request-ID": "two"})
        assert report.plan == "return"


async def test_branches_share_what_they_have_in_common() -> None:
    """Two ways on from one history both start from its lease, which neither
    takes from the other."""
    async with staged() as stage:
        first, said = await ask(stage, opening())
        one, other = (on(opening(), said, text) for text in ("this? ", "that? "))
        report, answer = await ask(stage, one)
        assert report.returned_tokens >= first.prompt_tokens - 1
        # The lease of the common history has been superseded by the first
        # branch's own, which begins the same.
        branch, said = await ask(stage, other)
        assert branch.returned_tokens >= first.prompt_tokens - 1
        again, _ = await ask(stage, on(one, answer))
        assert again.returned_tokens >= report.prompt_tokens - 1
        grown, _ = await ask(stage, on(other, said))
        assert grown.returned_tokens >= branch.prompt_tokens - 1


async def test_two_users_who_begin_alike_get_their_own_answers() -> None:
    """The same first message is answered from the shared lease at most, and
    what follows is each one's own."""
    async with staged() as stage:
        _, said = await ask(stage, opening())
        _, same = await ask(stage, opening())
        assert same == said
        for text in ("I am one ", "I am two ", "I am three "):
            await ask(stage, on(opening(), said, text))


async def test_what_the_client_drops_of_answers_costs_no_conversation() -> None:
    """A client that strips or rewrites answers is recognised by its own words,
    and answered right."""
    async with staged() as stage:
        first, _ = await ask(stage, opening())
        messages = on(opening(), {"content": "something else entirely"})
        report, _ = await ask(stage, messages)
        assert report.plan == "return"
        assert report.returned_tokens >= first.prompt_tokens - 1


async def test_it_can_be_switched_off() -> None:
    """Then who names no conversation gets plain disaggregation."""
    async with staged(settings={"derive_conversations": False}) as stage:
        report, said = await ask(stage, opening())
        report, _ = await ask(stage, on(opening(), said))
        assert report.reason == "no_conversation"
        assert not stage.cluster.decode[0].engine.leases.events


@pytest.mark.parametrize(
    "header",
    [
        "x-conversation-id",
        "x-claude-code-session-id",
        "session_id",
        "x-session-affinity",
    ],
)
async def test_an_agents_own_header_names_its_conversation(header: str) -> None:
    """Also where the history can't be told to go on: it was compacted."""
    async with staged() as stage:
        await ask(stage, opening(), **{header: "the agent's own"})
        shorter = [opening()[0], {"role": "user", "content": "in short: " * 20}]
        report, _ = await ask(stage, shorter, **{header: "the agent's own"})
        assert report.plan == "return"
        stranger, _ = await ask(stage, shorter[:1] + opening("x ")[1:], **{header: "b"})
        assert stranger.reason == "first_turn"
