"""The shapes that agents come in, on ChatKVLoom: lanes, histories and reuse.

Each lane of a thread is a conversation of its own, whose turns reuse its last one
and no other's; and every answer is what an engine without any cache would say.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from e2e.served import Served, Turn, served
from e2e.test_router_stage import CHAT, fresh
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
)
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt

import kvloom
from kvloom.langchain import ChatKVLoom
from kvloom.langgraph import retry_on
from kvloom.protocol import PlanKind, PlanReport, conversation_id
from kvloom.telemetry import Carried, Event, TurnEnded, TurnFailed, TurnStarted
from kvloom.testing import Answer, Call, Context, respond

LONG = "You know the country well and answer briefly. " * 12
"""Enough to be worth a return."""


def each_tool_once(context: Context) -> Answer:
    """Calls every tool that was not called since the last question, then answers."""
    since = context.text.rpartition("<|im_start|>user\n")[2]
    for offered in context.tools:
        name = offered["function"]["name"]
        if f'"name": "{name}"' not in since:
            return Answer(tool_calls=(Call(name=name),))
    return Answer(content=respond(Context(token_ids=context.token_ids)).content)


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    """Engines whose model uses each of its tools once a question."""
    # What pulling and computing cost a fake engine is no measure of anything.
    unlearned = {"learn_threshold": False}
    with served(responder=each_tool_once, settings=unlearned) as stage:
        yield stage


@dataclass(slots=True)
class Watch:
    """A model, and what became of its turns."""

    here: Served
    thread: str
    events: list[Event] = field(default_factory=list)

    @property
    def config(self) -> RunnableConfig:
        return {"configurable": {"thread_id": self.thread}}

    def model(self, **options: Any) -> ChatKVLoom:
        return ChatKVLoom(
            model=self.here.model,
            base_url=self.here.base_url,
            api_key="none",
            max_tokens=200,
            events=self.events.append,
            **options,
        )

    def id(self, lane: str) -> str:
        return conversation_id(namespace="", thread=self.thread, lane=lane)

    def carried(self, lane: str) -> list[Carried]:
        """Whether each turn of a lane brought a handle."""
        return [
            event.carried
            for event in self.events
            if isinstance(event, TurnStarted) and event.conversation == self.id(lane)
        ]

    def lanes(self) -> list[str]:
        """The conversations that were spoken in, turn by turn."""
        return [e.conversation for e in self.events if isinstance(e, TurnStarted)]

    def reports(self, lane: str) -> list[PlanReport]:
        """What the router did with each turn of a lane."""
        return [
            event.plan
            for event in self.events
            if isinstance(event, TurnEnded)
            and event.conversation == self.id(lane)
            and event.plan is not None
        ]

    def plans(self, lane: str) -> list[PlanKind]:
        return [report.plan for report in self.reports(lane)]

    def reused(self, lane: str, plan: PlanKind) -> list[int]:
        """Tokens that each turn with this plan had from a cache."""
        return [
            (report.local_tokens or 0) + (report.returned_tokens or 0)
            for report in self.reports(lane)
            if report.plan is plan
        ]

    def turns(self, lane: str) -> list[Turn]:
        return [t for t in self.here.turns() if t.conversation == self.id(lane)]

    def check_lanes(self, *lanes: str, is_rewritten: bool = False) -> None:
        """These are all; each speaks for one agent and goes on from itself.

        Args:
            is_rewritten: between two questions the framework puts other agents'
                messages into a history or takes some out: no handle fits then, and
                what the two have in common is reused.
        """
        assert set(self.lanes()) == {self.id(lane) for lane in lanes}
        for lane in lanes:
            turns = self.turns(lane)
            assert len({turn.body["messages"][0]["content"] for turn in turns}) == 1
            first, *later = self.plans(lane)
            assert first is PlanKind.COLD
            assert later == [PlanKind.RETURN] * len(later) != []
            if not is_rewritten:
                assert self.carried(lane)[1:] == [Carried.HANDLE] * len(later)
            assert all(self.reused(lane, PlanKind.RETURN))

    def check_answers(self, lane: str, histories: list[list[Any]]) -> None:
        """The last message of each history is the right answer of its last turn."""
        for history in histories:
            message = history[-1] if isinstance(history[-1], AIMessage) else history[1]
            asked = [m.text for m in history if m.type == "human"][-1]
            turn = [t for t in self.turns(lane) if _last_question(t) == asked][-1]
            self.check_answer(turn, message)

    def check_answer(self, turn: Turn, message: Any) -> None:
        """It is what an engine that has seen nothing says."""
        body = {k: turn.body[k] for k in ("messages", "tools") if k in turn.body}
        body |= {"max_tokens": 200}
        answer = asyncio.run(fresh(CHAT, body, responder=each_tool_once))
        assert message.text == answer["choices"][0]["message"]["content"]


def _last_question(turn: Turn) -> str:
    said = [m["content"] for m in turn.body["messages"] if m["role"] == "user"]
    last: str = said[-1]
    return last


def _agent(
    watch: Watch,
    name: str,
    *tools: Any,
    model: ChatKVLoom | None = None,
    middleware: Sequence[Any] = (),
    meet: threading.Barrier | None = None,
    **options: Any,
) -> Any:
    """An agent whose every turn finds prefill without its cache."""
    return create_agent(
        watch.model() if model is None else model,
        list(tools),
        system_prompt=f"You are {name}. {LONG}",
        name=name,
        middleware=[*middleware, Forgetful(watch.here, meet)],
        **options,
    )


class Forgetful(AgentMiddleware[Any, Any, Any]):
    """Has prefill lose its cache before each turn, as another prefill engine has."""

    def __init__(self, here: Served, meet: threading.Barrier | None) -> None:
        super().__init__()
        self._here, self._meet = here, meet

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        if self._meet is not None:
            self._meet.wait(timeout=60)
        self._here.lose_prefill_caches()
        return handler(request)


@tool
def timetable() -> str:
    """All trains."""
    return "the 9:30 and the 11:05"


@tool
def weather() -> str:
    """The weather."""
    return "rain"


class Talk(TypedDict):
    """Messages that agents pass on."""

    messages: Annotated[list[Any], add_messages]


class Jobs(TypedDict):
    """Work for many, and what they said."""

    jobs: list[str]
    said: Annotated[list[Any], add]


@pytest.mark.parametrize("num_branches", [2, 4])
def test_sent_branches_each_go_on_from_their_own_turn(
    here: Served, num_branches: int
) -> None:
    """``Send`` runs one agent many times at once, in one lane: each branch's next
    turn finds its own last one."""
    watch = Watch(here, f"fan-{num_branches}")
    histories = _fan_out(watch, num_branches)

    assert set(watch.lanes()) == {watch.id("work|model")}
    began = [Carried.NOTHING_FITS] * num_branches
    assert sorted(watch.carried("work|model")) == sorted(
        began + [Carried.HANDLE] * num_branches * 2
    )
    assert all(watch.reused("work|model", PlanKind.RETURN))
    watch.check_answers("work|model", histories)


def test_more_branches_than_the_router_has_leases_for_are_only_slower(
    here: Served,
) -> None:
    """The router keeps four leases a conversation: of seven branches in one lane
    some compute their history again, and all answer as they should."""
    watch = Watch(here, "fan-7")

    histories = _fan_out(watch, 7)

    assert len(watch.plans("work|model")) == 7 * 3
    watch.check_answers("work|model", histories)


def test_branches_with_lanes_of_their_own_all_reuse(here: Served) -> None:
    """As many as there are, where each names its lane."""
    watch = Watch(here, "fan-own")

    histories = _fan_out(watch, 7, is_named=True)

    lanes = [f"work-{n}" for n in range(7)]
    watch.check_lanes(*lanes)
    for lane in lanes:
        assert all(watch.reused(lane, PlanKind.RETURN))
    watch.check_answers(lanes[3], [histories[3]])


def _fan_out(
    watch: Watch, num_branches: int, *, is_named: bool = False
) -> list[list[Any]]:
    """Each branch's messages. All wait for each other before every turn."""
    meet = threading.Barrier(num_branches)
    worker = _agent(watch, "worker", timetable, weather, meet=meet)

    def work(job: dict[str, Any]) -> dict[str, list[Any]]:
        lane = f"work-{job['number']}"
        own = (
            kvloom.conversation(watch.thread, lane=lane) if is_named else nullcontext()
        )
        with own:
            state = worker.invoke({"messages": [("user", job["text"])]})
        return {"said": [state["messages"]]}

    builder = StateGraph(Jobs)
    builder.add_node("work", work)
    builder.add_conditional_edges(
        START,
        lambda state: [
            Send("work", {"number": n, "text": job})
            for n, job in enumerate(state["jobs"])
        ],
    )
    graph = builder.compile(checkpointer=InMemorySaver())
    jobs = [f"Find out about town number {n}. " * 20 for n in range(num_branches)]
    config: RunnableConfig = {**watch.config, "max_concurrency": num_branches}
    said: list[list[Any]] = graph.invoke({"jobs": jobs, "said": []}, config)["said"]
    return said


def test_parallel_branches_are_lanes_of_their_own(here: Served) -> None:
    """Two nodes of one step, each an agent: neither sees the other's turns."""
    watch = Watch(here, "parallel")
    builder = StateGraph(Talk)
    for name in ("north", "south"):
        builder.add_node(name, _agent(watch, name, timetable))
        builder.add_edge(START, name)
    graph = builder.compile(checkpointer=InMemorySaver())

    for question in ("Which way? ", "And back? "):
        graph.invoke({"messages": [("user", question * 10)]}, watch.config)

    watch.check_lanes("north|model", "south|model", is_rewritten=True)


def test_agents_in_subgraphs_are_lanes_of_their_own(here: Served) -> None:
    """An agent in a subgraph, one in its parent: turn after turn, each goes on
    from itself."""
    watch = Watch(here, "nested")
    inner = StateGraph(Talk)
    inner.add_node("math", _agent(watch, "math", timetable))
    inner.add_edge(START, "math")
    outer = StateGraph(Talk)
    outer.add_node("chief", _agent(watch, "chief", weather))
    outer.add_node("team", inner.compile())
    outer.add_edge(START, "chief")
    outer.add_edge("chief", "team")
    graph = outer.compile(checkpointer=InMemorySaver())

    for question in ("Which way? ", "And back? "):
        state = graph.invoke({"messages": [("user", question * 10)]}, watch.config)

    watch.check_lanes("chief|model", "team|math|model")
    watch.check_answers("team|math|model", [state["messages"]])


def test_two_threads_of_one_agent_are_two_conversations(here: Served) -> None:
    """Whoever asks in another thread starts from nothing of mine."""
    one, other = Watch(here, "thread-1"), Watch(here, "thread-2")
    one.events = other.events
    agent = _agent(one, "guide", timetable, checkpointer=InMemorySaver())

    for watch in (one, other, one):
        agent.invoke({"messages": [("user", "Which way? " * 10)]}, watch.config)

    for watch in (one, other):
        assert watch.plans("model")[0] is PlanKind.COLD
        assert watch.carried("model")[1:] == [Carried.HANDLE] * (
            len(watch.carried("model")) - 1
        )


# create_supervisor builds on an agent that LangGraph calls deprecated.
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_a_supervisor_and_its_agents_are_three_lanes(here: Served) -> None:
    """langgraph-supervisor: hand-offs change nothing in what each agent reuses,
    and each reads who else has spoken."""
    from langgraph_supervisor import create_supervisor

    watch = Watch(here, "supervised")
    agents = [_agent(watch, name, timetable) for name in ("north", "south")]
    graph = create_supervisor(
        agents, model=watch.model(), prompt=f"You are the chief. {LONG}"
    ).compile(checkpointer=InMemorySaver())

    for question in ("Which way? ", "And back? "):
        state = graph.invoke({"messages": [("user", question * 10)]}, watch.config)

    lanes = ("supervisor|agent", "north|model", "south|model")
    watch.check_lanes(*lanes, is_rewritten=True)
    assert Carried.NOTHING_FITS not in watch.carried("supervisor|agent")[1:]
    (*_, last) = watch.turns("supervisor|agent")
    names = {m.get("name") for m in last.body["messages"] if m["role"] == "assistant"}
    assert names == {None, "north", "south"}
    watch.check_answers("supervisor|agent", [state["messages"]])


def test_a_swarm_is_as_many_lanes_as_agents(here: Served) -> None:
    """langgraph-swarm: an agent that is handed the talk back goes on from its own
    last turn."""
    from langgraph_swarm import create_handoff_tool, create_swarm

    watch = Watch(here, "swarm")
    to_south, to_north = (create_handoff_tool(agent_name=n) for n in ("south", "north"))
    graph = create_swarm(
        [
            _agent(watch, "north", timetable, to_south),
            _agent(watch, "south", weather, to_north),
        ],
        default_active_agent="north",
    ).compile(checkpointer=InMemorySaver())

    for question in ("Which way? ", "And back? "):
        state = graph.invoke({"messages": [("user", question * 10)]}, watch.config)

    watch.check_lanes("north|model", "south|model")
    watch.check_answers("north|model", [state["messages"]])


def test_an_interrupted_node_asks_again_in_its_conversation(here: Served) -> None:
    """Its node is run again when it is resumed, and sends the same request again."""
    watch = Watch(here, "interrupted")
    model = watch.model()

    def ask(state: Talk) -> dict[str, list[Any]]:
        answer = model.invoke([("system", LONG), *state["messages"]])
        return {"messages": [answer, ("user", interrupt("more? "))]}

    builder = StateGraph(Talk)
    builder.add_node("ask", ask)
    builder.add_node("close", lambda state: {"messages": [model.invoke("bye")]})
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=InMemorySaver())

    graph.invoke({"messages": [("user", "Which way? " * 10)]}, watch.config)
    here.lose_prefill_caches()
    state = graph.invoke(Command(resume="north"), watch.config)

    first, again = watch.turns("ask")
    assert first.body["messages"] == again.body["messages"]
    assert watch.plans("ask") == [PlanKind.COLD, PlanKind.RETURN]
    watch.check_answers("ask", [state["messages"][:2]])


def test_a_tool_that_waits_for_approval_costs_no_reuse(here: Served) -> None:
    """A person may look at a call for as long as they like."""
    watch = Watch(here, "approved")
    asks = HumanInTheLoopMiddleware(interrupt_on={"timetable": True})
    agent = _agent(
        watch, "guide", timetable, middleware=[asks], checkpointer=InMemorySaver()
    )

    agent.invoke({"messages": [("user", "Which way? " * 10)]}, watch.config)
    state = agent.invoke(
        Command(resume={"decisions": [{"type": "approve"}]}), watch.config
    )

    watch.check_lanes("model")
    assert watch.plans("model") == [PlanKind.COLD, PlanKind.RETURN]
    watch.check_answers("model", [state["messages"]])


def test_an_agent_that_goes_back_in_time_reuses_what_both_branches_share(
    here: Served,
) -> None:
    """A fork goes on from where it forked; then each branch goes on from itself."""
    watch = Watch(here, "forked")
    agent = _agent(watch, "guide", checkpointer=InMemorySaver())

    def ask(text: str, config: RunnableConfig) -> Any:
        return agent.invoke({"messages": [("user", text * 10)]}, config)

    ask("Which way? ", watch.config)
    fork = agent.get_state(watch.config).config
    ask("And back? ", watch.config)
    main = agent.get_state(watch.config).config
    forked = ask("And on? ", fork)
    ask("And then? ", watch.config)
    state = ask("And home? ", main)

    assert watch.plans("model") == [PlanKind.COLD] + [PlanKind.RETURN] * 4
    assert all(watch.reused("model", PlanKind.RETURN))
    watch.check_answers("model", [forked["messages"], state["messages"]])


def test_a_trimmed_history_is_another_history(here: Served) -> None:
    """A middleware that sends the last messages only: no handle fits them, what
    they share with the last turn is reused all the same, and no answer is wrong."""
    watch = Watch(here, "trimmed")

    class Trim(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(messages=request.messages[-3:]))

    agent = _agent(watch, "guide", middleware=[Trim()], checkpointer=InMemorySaver())

    for number in range(4):
        question = f"Which way from {number}? " * 10
        state = agent.invoke({"messages": [("user", question)]}, watch.config)

    assert watch.carried("model") == [
        Carried.NOTHING_FITS,
        Carried.HANDLE,
        Carried.NOTHING_FITS,
        Carried.NOTHING_FITS,
    ]
    assert [len(turn.body["messages"]) for turn in watch.turns("model")] == [2, 4, 4, 4]
    watch.check_answer(watch.turns("model")[-1], state["messages"][-1])


def test_a_summary_is_a_lane_of_its_own(here: Served) -> None:
    """LangChain's summarising middleware asks beside the agent, which then starts
    from its summary and goes on from there."""
    watch = Watch(here, "summed-up")
    summing = SummarizationMiddleware(
        watch.model(), trigger=("messages", 5), keep=("messages", 1)
    )
    agent = _agent(watch, "guide", middleware=[summing], checkpointer=InMemorySaver())

    for number in range(4):
        question = f"Which way from {number}? " * 10
        state = agent.invoke({"messages": [("user", question)]}, watch.config)

    lane = "SummarizationMiddleware.before_model"
    assert set(watch.lanes()) == {watch.id("model"), watch.id(lane)}
    assert watch.carried("model") == [
        Carried.NOTHING_FITS,
        Carried.HANDLE,
        Carried.NOTHING_FITS,
        Carried.HANDLE,
    ]
    watch.check_answer(watch.turns("model")[-1], state["messages"][-1])


def test_a_turn_that_the_agent_retries_keeps_its_lane(here: Served) -> None:
    """LangChain's retry middleware with ``retry_on``: the second attempt is in the
    same conversation, and its answer is right."""
    watch = Watch(here, "retried")
    retry = ModelRetryMiddleware(max_retries=2, retry_on=retry_on, initial_delay=0.0)
    agent = _agent(
        watch,
        "guide",
        middleware=[retry],
        checkpointer=InMemorySaver(),
        model=watch.model(max_retries=0),
    )
    agent.invoke({"messages": [("user", "Which way? " * 10)]}, watch.config)
    here.stage.cluster.decode[0].engine.fail_next(status=503)

    state = agent.invoke({"messages": [("user", "And back? " * 10)]}, watch.config)

    assert any(isinstance(event, TurnFailed) for event in watch.events)
    assert set(watch.lanes()) == {watch.id("model")}
    watch.check_answers("model", [state["messages"]])
