# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. A sticky LangGraph agent
#
# In LangGraph a conversation has a name already: the `thread_id` of the config. `ChatKVLoom`
# is a chat model that reads it, so that each turn of the agent is sent to where the KV cache
# of its last turn is. ([Notebook 1](01_drop_in_client.ipynb) says what that is.)
#
# You will see: an agent that calls tools, what each of its turns reused, two agents in one
# thread, and the end of a thread.

# %%
from contextlib import ExitStack

import kvloom

stack = ExitStack()
cluster = stack.enter_context(kvloom.local_cluster(env={"KVLOOM_DIRECT_TOKENS": "0"}))

# %% [markdown]
# ## The agent
#
# Nothing in it is special but the model's class. The two tools return a page of text each, as
# tools do: this is what makes an agent's history grow.

# %%
from typing import Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from kvloom.langchain import ChatKVLoom

Town = Literal["Vienna", "Prague", "Berlin"]


@tool
def trains(town: Town) -> str:
    """All trains to a town today."""
    rows = (
        f"Train {100 + n} leaves at {6 + n}:15 from platform {n}. " for n in range(12)
    )
    return f"To {town}. " + "".join(rows)


@tool
def weather(town: Town) -> str:
    """Today's weather in a town, hour by hour."""
    hours = (f"At {hour}:00 it has {hour} degrees. " for hour in range(6, 20))
    return f"In {town}. " + "".join(hours)


model = ChatKVLoom(
    model=cluster.model,
    base_url=cluster.base_url,
    api_key="none",
    temperature=0,
    max_tokens=40,
)

# %% [markdown]
# The model of the local cluster is too small to choose tools well, so it is told which one to
# use at each turn. With a model of a useful size you leave this cell out.

# %%
from langchain.agents.middleware import wrap_model_call

SCRIPT = ("trains", "weather", "none")


@wrap_model_call
def scripted(request, handler):
    asked = max(i for i, m in enumerate(request.messages) if m.type == "human")
    turn = sum(isinstance(m, AIMessage) for m in request.messages[asked:])
    return handler(request.override(tool_choice=SCRIPT[turn]))


# %% [markdown]
# ## Two questions in one thread
#
# `wrap` is not needed for `ChatKVLoom` to find the thread. It adds two things: `on_run`, which
# is told after each run what its turns were, and `end`, below.

# %%
from kvloom.langgraph import wrap

DESK = (
    "You are a travel desk. You look things up before you answer, and answer briefly. "
)

agent = wrap(
    create_agent(
        model,
        [trains, weather],
        system_prompt=DESK * 8,
        middleware=[scripted],
        checkpointer=InMemorySaver(),
    ),
    on_run=lambda run: print("this run:", run),
)
thread = {"configurable": {"thread_id": "journey-7"}}


def ask(question):
    return agent.invoke({"messages": [("user", question)]}, thread)


ask("When can I go to Vienna, and do I need a coat?")
state = ask("And to Prague?")

# %% [markdown]
# The first run starts from nothing and still reuses a good part: its second and third turn go
# on from its first. The second run goes on from the first one, because the thread is the same.
#
# ## Turn by turn
#
# Every message of the model has the report of its turn in `response_metadata`.

# %%
print("turn  prompt  reused  computed  plan")
answers = [m for m in state["messages"] if isinstance(m, AIMessage)]
for number, message in enumerate(answers, 1):
    told = message.response_metadata["kvloom"]
    reused = told["local_tokens"] + told["returned_tokens"]
    print(
        f"{number:4} {told['prompt_tokens']:7} {reused:7} {told['computed_tokens']:9}  "
        f"{told['plan']}: {told['reason']}"
    )

# %% [markdown]
# What is computed is what is new: the result of a tool, or the next question, and a few
# tokens of the template around it. It does not grow with the history.
#
# ## Several agents in a thread
#
# A supervisor and its specialists share a thread but not a history. Each place in the graph
# where a model is called is a *lane*, with a conversation of its own; you do nothing for it. The
# agent above has one lane, `model`. An agent `clerk` in a subgraph would have `clerk|model`.
# `conversation_id` tells what is sent for a lane, if you want to look for it at the router.

# %%
for lane in ("model", "clerk|model"):
    sent = kvloom.conversation_id(namespace="", thread="journey-7", lane=lane)
    print(f"{lane:12} is sent as {sent}")

# %% [markdown]
# ## The end of a thread
#
# Decode keeps the last turn of every lane for some minutes. When the journey is booked, that
# is for nothing: `end` gives the memory back.

# %%
print("conversations ended:", agent.end(thread))

# %%
stack.close()

# %% [markdown]
# ## What can go wrong
#
# - No `thread_id`: there is no conversation to go on from.
# - A thread (of the operating system) that was started by hand inside a node knows no
#   conversation. A `RawThreadWarning` says so, and how to mend it.
# - Middleware that trims or summarises the history makes another history of it:
#   [notebook 3](03_what_breaks_reuse.ipynb).
