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
# # 1. The drop-in client
#
# An agent talks in loops: it asks the model, does what the model wants, and asks again with
# everything said so far. The model reads all of it at every turn.
#
# Reading is work. For each token of the prompt the engine computes a piece of state, and
# keeps it in its *KV cache*; only then can it write the first word of its answer. What is
# in the cache already need not be computed again. That is all that you have to know about
# it: **a turn that finds its history in the cache starts sooner.**
#
# Big installations read and write on different engines: *prefill* reads the prompt, *decode*
# writes the answer. After a turn decode has the whole history in its cache, and prefill,
# which reads the next prompt, lacks what decode wrote. kvloom brings it back. For that it
# has to know which requests belong together, and this is what the client is for.
#
# You will see: what to change in your code (two lines), and how to see what it brought.

# %% [markdown]
# ## A cluster
#
# `local_cluster()` uses the cluster that the variable `KVLOOM_BASE_URL` names. Without it, a
# small one is started here: two engines and a router on this machine, with a model of 135
# million parameters, which takes about a minute. It is fast enough to try things with, and
# too small to say anything clever.
#
# (`KVLOOM_DIRECT_TOKENS=0` has every turn go through prefill, so that every turn has counts
# to look at. Otherwise decode does short turns alone.)

# %%
from contextlib import ExitStack

import kvloom

stack = ExitStack()
cluster = stack.enter_context(kvloom.local_cluster(env={"KVLOOM_DIRECT_TOKENS": "0"}))
print("the model is called", cluster.model)

# %% [markdown]
# ## Two lines
#
# The client is OpenAI's own class with the same arguments. The first line that changes is
# the import, the second one names the conversation.

# %%
from kvloom.openai import OpenAI, report  # instead of: from openai import OpenAI

client = stack.enter_context(OpenAI(base_url=cluster.base_url, api_key="none"))

GUIDE = "You are a guide who knows the rivers of Europe well. Answer briefly. " * 25
history = [{"role": "system", "content": GUIDE}]


def ask(question, name):
    """One turn: ask, and keep the answer as it came."""
    history.append({"role": "user", "content": question})
    with client.conversation(name):
        answer = client.chat.completions.create(
            model=cluster.model, messages=history, max_tokens=30
        )
    history.append(answer.choices[0].message)
    return answer


for question in ("Name three rivers.", "Which is the longest?", "Where does it end?"):
    plan = report(ask(question, "shopper-42")).plan
    if plan.prompt_tokens is None:  # decode did it alone, and had no room for a lease
        print("no counts")
        continue
    engine = "prefill" if plan.prefill else "decode"  # which may do a short turn alone
    print(
        f"{plan.prompt_tokens:4} tokens of prompt: {plan.local_tokens:4} found in "
        f"{engine}'s cache, {plan.returned_tokens:3} brought back from decode, "
        f"{plan.computed_tokens:4} computed"
    )

# %% [markdown]
# The first turn computes everything: there is nothing to find yet. From the second on only
# the new question is computed. Its beginning was still in prefill's own cache, because this
# cluster has one prefill engine and nobody else uses it; the answer before, which only decode
# had, was brought back. On a busy cluster, or one with many prefill engines, the beginning is
# usually gone as well, and then all of it comes from decode.
#
# ## Why a turn went as it did
#
# Every answer carries the router's plan and its reason.

# %%
last = report(ask("And the second longest?", "shopper-42"))
print("plan:  ", last.plan.plan)
print("reason:", last.plan.reason)

# %% [markdown]
# `return` with `lease_held` means that decode still held the last turn, and prefill pulled it
# from there. `cold` means that nothing was brought back; the reason says why.
#
# ## How long until the first word
#
# With `stream=True` the report also has the seconds from sending to the first chunk. A new
# conversation of the same length, for comparison, begins with other words, so that no cache
# has it.

# %%


def first_word_s(messages, name):
    with client.conversation(name):
        stream = client.chat.completions.create(
            model=cluster.model, messages=messages, max_tokens=5, stream=True
        )
        for _ in stream:
            pass
    return report(stream).ttft_s


goes_on = [*history, {"role": "user", "content": "And the third?"}]
starts_new = [{"role": "system", "content": "A new one. " + GUIDE}, *goes_on[1:]]
print(f"goes on from the cache: {first_word_s(goes_on, 'shopper-42'):.2f} s")
print(f"starts from nothing:    {first_word_s(starts_new, 'shopper-43'):.2f} s")

# %% [markdown]
# ## What the name is
#
# Any text that is the same for all turns of a conversation, and another one for others: the id
# of a thread, a user, a ticket. It is hashed before it is sent, so the server never sees it.
# Two conversations under one name cost reuse, and never a right answer: engines compare the
# tokens before they use anything.

# %%
with client.conversation("shopper-42") as sent:
    print("what is sent:", sent)

# %% [markdown]
# ## When it is over
#
# Decode keeps the last turn for some minutes, in case the conversation goes on. If you know
# that it does not, say so, and the memory is free for others at once.

# %%
print("the router knew it:", client.end_conversation("shopper-42"))

# %%
stack.close()

# %% [markdown]
# ## What can go wrong
#
# - The name differs from turn to turn: every turn is a `first_turn`.
# - The history is changed on its way back: reuse ends at the first token that differs.
#   [Notebook 3](03_what_breaks_reuse.ipynb) shows what does that.
# - The server is no kvloom router: a warning says so once, and nothing else changes.
