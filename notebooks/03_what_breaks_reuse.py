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
# # 3. What breaks reuse, and how to see it
#
# A cache of a history is good for exactly the tokens that the next prompt begins with. What
# stands behind the first token that differs has to be computed, even where it is the same
# text: each token's state depends on all the tokens before it.
#
# So one rule covers everything in this notebook: **what a turn can reuse ends at the first
# change.** An edit at the end of the history costs little, and one at the beginning costs all
# of it. A changed history never gives a wrong answer; it only costs time.

# %%
from contextlib import ExitStack

import kvloom

stack = ExitStack()
cluster = stack.enter_context(kvloom.local_cluster(env={"KVLOOM_DIRECT_TOKENS": "0"}))

# %% [markdown]
# ## An experiment
#
# Each case below plays the same two turns in a conversation of its own, and only changes what
# the second one sends. A salt of its own keeps it from finding what another case left in a
# cache.

# %%
import uuid

from kvloom.openai import OpenAI, report

client = stack.enter_context(OpenAI(base_url=cluster.base_url, api_key="none"))

RULES = "You help in a library, and you say where a book stands. Answer briefly. " * 12
NOTES = "The reader likes long novels, and has read all of these already. " * 12
OPENING = [
    {"role": "system", "content": "It is ten o'clock. " + RULES},
    {"role": "user", "content": NOTES + "What shall I read next?"},
]
NEXT = {"role": "user", "content": "Where does it stand?"}


def turn(messages, name, salt, max_tokens):
    with client.conversation(name):
        return client.chat.completions.create(
            model=cluster.model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"cache_salt": salt},
        )


def play(change):
    """Two turns; ``change`` makes the second one's messages from the history."""
    name, salt = uuid.uuid4().hex, uuid.uuid4().hex
    first = turn(OPENING, name, salt, max_tokens=32)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    return report(turn(change([*OPENING, answer]), name, salt, max_tokens=1)).plan


# %% [markdown]
# ## Six ways to go on
#
# - **unchanged**: the history as it was, and a question. This is what an agent should send.
# - **part of the answer missing**: models that think write their reasoning before the answer,
#   and many frameworks, LangChain's `ChatOpenAI` among them, do not send it back. (This small
#   model does not think, so the first half of its answer is left out instead.)
# - **message edited**: somebody rewrote an early message of the user.
# - **clock in the system prompt**: it says another time at every turn.
# - **summary**: the history was replaced by a short text, to save room.
# - **fork**: the last answer is thrown away, and the question asked another way.

# %%


def unchanged(history):
    return [*history, NEXT]


def part_missing(history):
    *before, answer = history
    kept = answer["content"][len(answer["content"]) // 2 :]
    return [*before, {**answer, "content": kept}, NEXT]


def edited(history):
    system, user, answer = history
    shorter = user["content"].replace("long novels", "short novels")
    return [system, {**user, "content": shorter}, answer, NEXT]


def clock(history):
    system, *rest = history
    later = system["content"].replace("ten o'clock", "five past ten")
    return [{**system, "content": later}, *rest, NEXT]


def summary(history):
    told = "So far: the reader likes long novels, and was told what to read next."
    return [history[0], {"role": "user", "content": told}, NEXT]


def fork(history):
    return [
        history[0],
        {"role": "user", "content": NOTES + "Which one is the longest?"},
    ]


CASES = {
    "unchanged": unchanged,
    "part of the answer missing": part_missing,
    "message edited": edited,
    "clock in the system prompt": clock,
    "summary": summary,
    "fork": fork,
}
plans = {name: play(change) for name, change in CASES.items()}

for name, plan in plans.items():
    if plan.prompt_tokens is None:  # decode did it alone, and had no room for a lease
        print(f"{name:28} no counts")
        continue
    reused = plan.local_tokens + plan.returned_tokens
    print(f"{name:28} {reused:4} of {plan.prompt_tokens} tokens reused")

# %%
import matplotlib.pyplot as plt

plt.rcParams["figure.dpi"] = 72
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
names = list(plans)[::-1]
start = [0] * len(names)
for source, colour in (
    ("local", "#7aa6c2"),
    ("returned", "#2a6f97"),
    ("computed", "#e07a5f"),
):
    counts = [getattr(plans[name], f"{source}_tokens") or 0 for name in names]
    axes.barh(names, counts, left=start, label=source, color=colour)
    start = [a + b for a, b in zip(start, counts, strict=True)]
axes.set_xlabel("tokens of the second prompt")
axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1), frameon=False)
plt.show()

# %% [markdown]
# *local* was in prefill's own cache (it had read the first prompt), *returned* was brought back
# from decode (which alone had the answer), and *computed* is what was paid for.
#
# - **unchanged** pays for the question only.
# - **part of the answer missing** pays for the answer and all behind it, at every turn, however
#   small the missing part is. `ChatKVLoom` keeps reasoning and sends it back; some models'
#   templates leave it out of the history on purpose.
# - **message edited** pays from the edit on.
# - **clock** pays for everything. Put what changes at the end of the prompt, into the newest
#   message.
# - **summary** pays for its own text, which is short: it may be worth it. Doing it at every turn
#   is not.
# - **fork** keeps all that both branches share.

# %% [markdown]
# ## Ask the router
#
# The router keeps the last turns of each conversation, and says in words what became of them.
# Its page shows the same, at the cluster's address with `/kvloom/` behind it.

# %%
import httpx

with client.conversation("a reader with a clock") as conversation:
    pass
salt = uuid.uuid4().hex
first = turn(OPENING, "a reader with a clock", salt, max_tokens=32)
answer = {"role": "assistant", "content": first.choices[0].message.content}
turn(clock([*OPENING, answer]), "a reader with a clock", salt, max_tokens=1)

told = httpx.get(f"{cluster.url}/kvloom/explain/{conversation}").json()
print(told["summary"])
print(told["turns"][0]["advice"])

# %%
stack.close()

# %% [markdown]
# ## What to take along
#
# 1. Append, and never rewrite: the system prompt and the tools first and always the same, in
#    the same order.
# 2. Send back what the model wrote, as it wrote it.
# 3. Trim or summarise rarely, and then much at once.
# 4. Look at `computed` next to what was new. If it is much more, something changed.
#
# [Notebook 4](04_measuring_your_agent.ipynb) does that for an agent of yours.
