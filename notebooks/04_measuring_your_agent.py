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
# # 4. Measuring your own agent
#
# Does it help *your* agent? Three things answer that: how many tokens of its prompts are
# reused, how long it waits for first words, and how long it would wait otherwise. This notebook
# measures all three, with an agent that stands in for yours: put your own into `agent` below
# and run the cells again.

# %%
from contextlib import ExitStack

import kvloom

stack = ExitStack()
cluster = stack.enter_context(
    kvloom.local_cluster("--dev-endpoints", env={"KVLOOM_DIRECT_TOKENS": "0"})
)

# %% [markdown]
# ## The agent
#
# Five turns, with the result of a tool before each of them: the shape of most agents. It gets a
# client, and names its conversation.

# %%
from kvloom.openai import OpenAI

TASK = "You look through the reports of a weather station, one after the other. " * 10


def tool_result(number):
    return f"Report {number}. " + "".join(
        f"Hour {hour}: {(7 * hour + number) % 30} degrees. " for hour in range(20)
    )


def agent(client, thread, salt, after_turn):
    """Your agent: anything that calls the model in a conversation."""
    history = [{"role": "system", "content": TASK}]
    with client.conversation(thread):
        for number in range(1, 6):
            history.append({"role": "user", "content": tool_result(number)})
            said = ""
            for chunk in client.chat.completions.create(
                model=cluster.model,
                messages=history,
                max_tokens=12,
                stream=True,
                extra_body={"cache_salt": salt},
            ):
                said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            history.append({"role": "assistant", "content": said})
            after_turn()


# %% [markdown]
# ## With returns, and without
#
# A fair comparison plays the same conversation twice on the same cluster, once with returns
# switched off (`kvloom_returns="off"`). Four things keep it fair:
#
# - the two do not find each other's tokens in a cache: a salt of its own for each;
# - prefill forgets its own cache after each turn. On this cluster there is one prefill engine
#   and one agent, and it would remember everything; on a busy one, or one with many prefill
#   engines, it has usually forgotten, or is another engine. This is the case that returns are
#   for. Where the engines do not let themselves be reset, the cell says so, and returns then
#   bring back the answers only;
# - both are warmed up by a first run that does not count;
# - one run on a laptop is an anecdote. Repeat it before you believe small differences.

# %%
import time
import uuid

import httpx


def forget():
    """Has the prefill engines lose their cache; whether they did."""
    for url in cluster.prefill:
        for _ in range(200):  # blocks that somebody is reading are in the way
            answer = httpx.post(f"{url}/reset_prefix_cache")
            if answer.status_code != 200:
                return False
            if answer.json()["success"]:
                break
            time.sleep(0.02)
    return bool(cluster.prefill)


def play(returns):
    """The conversation's ID, and what the client saw of its turns."""
    thread, salt = uuid.uuid4().hex, uuid.uuid4().hex
    with (
        OpenAI(
            base_url=cluster.base_url, api_key="none", kvloom_returns=returns
        ) as client,
        kvloom.watch() as run,
    ):
        agent(client, thread, salt, after_turn=forget)
    return kvloom.conversation_id(namespace="", thread=thread), run.report()


print("prefill forgets:", forget())
play("lazy")
without, report_without = play("off")
with_returns, report_with = play("lazy")
print("without returns:", report_without)
print("with returns:   ", report_with)

# %% [markdown]
# `kvloom.watch()` counts the turns that any kvloom client takes in its block, and needs no
# access to the router. `wrap(graph, on_run=…)` does the same for each run of a LangGraph graph.
#
# ## What the router saw
#
# The router's page is made from `/kvloom/snapshot`, and so can your plots be. It has the last
# turns of each conversation (a *lane*), under a short hash of its ID; `/kvloom/explain/` gives
# the hash for an ID. From another machine both ask for an admin's key.

# %%


def lane(conversation):
    tag = httpx.get(f"{cluster.url}/kvloom/explain/{conversation}").json()[
        "conversation"
    ]
    snapshot = httpx.get(f"{cluster.url}/kvloom/snapshot").json()
    (found,) = (each for each in snapshot["lanes"] if each["conversation"] == tag)
    return found["turns"]


turns = {"returns off": lane(without), "returns on": lane(with_returns)}
for name, each in turns.items():
    print(name, [f"{turn['plan']}: {turn['reason']}" for turn in each])

# %%
import matplotlib.pyplot as plt

plt.rcParams["figure.dpi"] = 72
COLOURS = {"local": "#7aa6c2", "returned": "#2a6f97", "computed": "#e07a5f"}

figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
for axes, (name, each) in zip(panels, turns.items(), strict=True):
    numbers = range(1, len(each) + 1)
    start = [0] * len(each)
    for source, colour in COLOURS.items():
        counts = [turn[f"{source}_tokens"] for turn in each]
        axes.bar(numbers, counts, bottom=start, label=source, color=colour)
        start = [a + b for a, b in zip(start, counts, strict=True)]
    axes.set_title(name)
    axes.set_xlabel("turn")
panels[0].set_ylabel("tokens of the prompt")
panels[1].legend(frameon=False)
plt.show()

# %% [markdown]
# Red is what was computed. Without returns it grows with the history; with them it stays at
# what is new in a turn.

# %%
figure, axes = plt.subplots(figsize=(5, 2.8), layout="constrained")
for (name, each), colour in zip(turns.items(), ("#e07a5f", "#2a6f97"), strict=True):
    times = [turn["ttft_s"] for turn in each]
    axes.plot(range(1, len(each) + 1), times, marker="o", label=name, color=colour)
axes.set_xticks(range(1, 6))
axes.set_xlabel("turn")
axes.set_ylabel("seconds to the first word")
axes.set_ylim(bottom=0)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# That is the time that your users wait. The longer the history, the more of it returns save.
#
# ## Is it working?
#
# The router's own verdict over the last minutes, as on its page. (Some of these turns were
# played with returns switched off, so it has something to say.)

# %%
diagnosis = httpx.get(f"{cluster.url}/kvloom/snapshot").json()["diagnosis"]
print(diagnosis["headline"])
for cause in diagnosis["causes"]:
    print(f"- {cause['turns']} turns: {cause['text']}")

# %%
stack.close()

# %% [markdown]
# ## With your own agent
#
# Call it where `agent` is called. If it uses LangGraph, give `ChatKVLoom` the same
# `returns="off"` or `"lazy"`, and use `wrap(graph, on_run=…)`. Then look at:
#
# - `reuse`, the share of prompt tokens that nobody computed. In a thread that goes on it
#   grows with every turn: 0.87 in the second run of notebook 2. If not, [notebook 3](03_what_breaks_reuse.ipynb) has the usual
#   reasons;
# - `plans`: turns that are `cold` and no first turns. Their reasons are in the report of each
#   answer, and on the router's page;
# - the median of `ttft_s`, in both runs.
