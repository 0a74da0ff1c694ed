"""Other servers than ours: how they are told of conversations, and who carries."""

import asyncio
from typing import Any

import openai
import pytest
from e2e.test_sdk_calls import HELLO, ID, NEXT, URL
from e2e.test_sdk_fake import FakeRouter

import kvloom
from kvloom._dialect import DIALECTS
from kvloom.openai import AsyncAzureOpenAI, AzureOpenAI, OpenAI
from kvloom.protocol import conversation_id


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    return OpenAI(base_url=URL, api_key="k", http_client=router.client(), **options)


def _ask(client: Any, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)


@pytest.mark.parametrize(
    ("dialect", "headers", "body"),
    [
        ("kvloom", {"x-session-id": ID}, {}),
        ("vllm-router", {"x-session-id": ID}, {}),
        ("vllm-multiturn-proxy", {}, {"conversation_id": ID}),
        ("dynamo", {"x-dynamo-session-id": ID}, {}),
        ("litellm", {"x-litellm-session-id": ID}, {}),
    ],
)
def test_each_kind_of_server_reads_its_own_names(
    dialect: Any, headers: dict[str, str], body: dict[str, str]
) -> None:
    """The conversation is named as that server expects it, and not otherwise."""
    router = FakeRouter(plan=None)
    client = _client(router, kvloom_dialect=dialect)

    with client.conversation("t"):
        _ask(client)

    (seen,) = router.seen
    named = {k: v for k, v in seen.headers.items() if "session" in k}
    assert named == headers
    assert seen.body == {"messages": HELLO, "model": "m"} | body


def test_every_dialect_is_tried_above() -> None:
    """A new line of the table needs a new line there."""
    assert set(DIALECTS) == {
        "kvloom",
        "vllm-router",
        "vllm-multiturn-proxy",
        "dynamo",
        "litellm",
    }
    assert all(d.headers or d.body for d in DIALECTS.values())


def test_dynamo_is_told_the_thread_of_a_lane() -> None:
    """A sub-agent's chain points to its parent's."""
    router = FakeRouter(plan=None)
    client = _client(router, kvloom_dialect="dynamo")

    with client.conversation("t", lane="math"):
        _ask(client)

    (seen,) = router.seen
    lane = conversation_id(namespace="", thread="t", lane="math")
    assert seen.headers["x-dynamo-session-id"] == lane
    assert seen.headers["x-dynamo-parent-session-id"] == ID


def test_no_other_server_is_sent_a_handle() -> None:
    """Only a kvloom router checks that a handle fits; no other is given one."""
    for dialect in set(DIALECTS) - {"kvloom"}:
        router = FakeRouter()
        client = _client(router, kvloom_dialect=dialect)
        with client.conversation("t"):
            _ask(client)
            _ask(client, NEXT)
        assert [seen.handle for seen in router.seen] == [None, None]


def test_my_own_name_wins_in_every_dialect() -> None:
    """What the call says is sent as it is, in header or body."""
    router = FakeRouter(plan=None)
    proxy = _client(router, kvloom_dialect="vllm-multiturn-proxy")
    litellm = _client(router, kvloom_dialect="litellm")

    with kvloom.conversation("t"):
        _ask(proxy, extra_body={"conversation_id": "mine"})
        _ask(litellm, extra_headers={"x-litellm-session-id": "mine"})
        _ask(litellm, extra_headers={"X-Session-ID": "mine"})

    first, second, third = router.seen
    assert first.body["conversation_id"] == "mine"
    assert second.headers["x-litellm-session-id"] == "mine"
    assert third.headers["x-litellm-session-id"] == "mine"


@pytest.mark.parametrize(
    ("carry", "conversation", "handles"),
    [("client", ID, [None, "kvl1.0000000000000000"]), ("router", ID, [None, None])],
)
def test_the_handles_are_carried_by_whom_i_say(
    carry: Any, conversation: str, handles: list[str | None]
) -> None:
    """The client by default; or the router, by the conversation's ID alone."""
    router = FakeRouter()
    client = _client(router, kvloom_carry=carry)

    with client.conversation("t"):
        _ask(client)
        _ask(client, NEXT)

    assert [seen.conversation for seen in router.seen] == [conversation] * 2
    assert [seen.handle for seen in router.seen] == handles


def test_off_is_as_if_kvloom_were_not_there() -> None:
    """``carry="off"`` sends openai's own bytes, also in a conversation."""
    ours, stock = FakeRouter(plan=None), FakeRouter(plan=None)
    client = _client(ours, kvloom_carry="off", kvloom_returns="off")

    with client.conversation("t"):
        _ask(client)
    _ask(openai.OpenAI(base_url=URL, api_key="k", http_client=stock.client()))

    assert ours.seen == stock.seen


@pytest.mark.parametrize(
    ("option", "names"),
    [("kvloom_carry", '"client", "router", "off"'), ("kvloom_dialect", '"dynamo"')],
)
def test_a_misspelled_choice_says_which_there_are(option: str, names: str) -> None:
    """An option that cannot be is an error at once."""
    options: Any = {option: "nonsense"}
    with pytest.raises(ValueError, match=names):
        OpenAI(api_key="k", **options)


AZURE: Any = {"api_key": "k", "azure_endpoint": "http://fake", "api_version": "1"}


def test_azures_clients_are_carried_too() -> None:
    """The forms for Azure take turns in a conversation, and copies keep it."""
    router = FakeRouter()
    client = AzureOpenAI(**AZURE, http_client=router.client())

    with client.conversation("t"):
        _ask(client)
        _ask(client.with_options(timeout=5), NEXT)

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))
    assert "/deployments/m/chat/completions" in router.seen[0].path
    assert isinstance(client, openai.AzureOpenAI)


def test_azures_asynchronous_client_is_carried_too() -> None:
    """So is the async one."""
    router = FakeRouter()

    async def talk() -> None:
        client = AsyncAzureOpenAI(**AZURE, http_client=router.async_client())
        with client.conversation("t"):
            await _ask(client)
            await _ask(client, NEXT)

    asyncio.run(talk())

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))
