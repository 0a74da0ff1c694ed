"""Plays conversations with whoever serves them, one turn at a time.

Every turn of every conversation is a row: answered, or with what came instead. An
answer is judged once its conversation is over, since asking what is right takes time
that would count as the tool's.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp

from .dialogues import dialogue
from .results import Results
from .reuse_rows import Place, PrefillCache, Variant, error_row, turn_row
from .talks import Message, Talk, body_of
from .ways import Ask, Asked, Contestant, Done, TurnFailedError, forget

NOT_ASKED: Final = "not asked: the turn before it failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """A turn that was answered, and is to be judged."""

    place: Place
    body: dict[str, Any]
    asked: Asked
    history: list[int]


class Player:
    """Plays conversations.

    Args:
        http: a client.
        model: the name to ask for.
        singles: ordinary vLLMs, each by itself and in turn, so that what one core is
            slower than another is nobody's; the first says what is right.
        others: who serves the other variants.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        model: str,
        singles: Sequence[Contestant],
        others: Mapping[Variant, Contestant],
    ) -> None:
        self._http = http
        self._model = model
        self._single = singles[0]
        self._contestants = {
            Variant.SINGLE: deque(singles),
            **{variant: deque([each]) for variant, each in others.items()},
        }
        """By variant, whose turn it is first."""
        self._talk = ""
        self._truths: dict[tuple[int, ...], list[int]] = {}
        """Right answers by prompt: what one vLLM said, of this conversation."""

    async def rehearse(
        self, seed: int, variants: Sequence[Variant], told: Callable[[Variant], None]
    ) -> None:
        """A short conversation that is not counted: first requests are slow.

        Who fails here fails below too, and is counted there.
        """
        talk = dialogue(
            seed=seed, repeat=-1, prefix_tokens=100, num_turns=2, call_tokens=8
        )
        unseen = Results(None, {})
        for variant in variants:
            told(variant)
            for _ in tuple(self._contestants[variant]):
                await self.play(talk, variant, "kept", unseen)

    async def play(
        self, talk: Talk, variant: Variant, cache: PrefillCache, results: Results
    ) -> None:
        """Play it with a variant; *single*, which says what is right, comes first.

        A turn that fails ends the conversation; it and those left are rows too.
        """
        if talk.name != self._talk:
            self._talk = talk.name
            self._truths.clear()
        self._contestants[variant].rotate(-1)
        places = [
            Place(
                variant=variant,
                prefill_cache=cache,
                conversation=talk.name,
                prefix_tokens=talk.prefix_tokens,
                turn=turn + 1,
            )
            for turn in range(talk.num_turns)
        ]
        played, failure = await self._played(talk, places)
        for turn in played:
            await self._judge(turn, results)
        for place in places[len(played) :]:
            results.add(error_row(place, failure))
            failure = NOT_ASKED

    async def _played(
        self, talk: Talk, places: Sequence[Place]
    ) -> tuple[list[_Played], str]:
        """All turns up to the first that fails, and why that one did."""
        # Nobody finds what another variant has left in a cache.
        salt = uuid.uuid4().hex
        messages: list[Message] = list(talk.opening)
        history: list[int] = []
        played: list[_Played] = []
        before: Done | None = None
        for place in places:
            turn = place.turn - 1
            body = body_of(talk, turn, messages, model=self._model, salt=salt)
            is_final = turn == talk.num_turns - 1
            ask = Ask(body=body, conversation=f"bench-{salt}", is_final=is_final)
            try:
                before = before or await self._done(place)
                asked = await self._asked(ask, place)
                done = await self._done(place)
            except TurnFailedError as error:
                return played, str(error)
            asked = replace(asked, done=done.since(before))
            before = done
            played.append(_Played(place=place, body=body, asked=asked, history=history))
            if not is_final:
                heard = asked.heard
                messages = talk.next_messages(messages, heard.message, turn + 1)
                history = heard.prompt_ids + heard.token_ids
                await asyncio.sleep(talk.pause_s(turn + 1))
        return played, ""

    async def _done(self, place: Place) -> Done:
        return await self._contestants[place.variant][-1].done(self._http)

    async def _asked(self, ask: Ask, place: Place) -> Asked:
        """One turn; where its cache is lost, prefill loses it while the answer
        goes on."""
        contestant = self._contestants[place.variant][-1]
        if place.prefill_cache == "kept":
            return await contestant.way.ask(ask)
        losing: list[asyncio.Task[None]] = []

        def lose() -> None:
            forgetting = forget(self._http, contestant.prefill)
            losing.append(asyncio.create_task(forgetting))

        try:
            asked = await contestant.way.ask(replace(ask, on_first=lose))
            await asyncio.gather(*losing)
        finally:
            for task in losing:
                task.cancel()
        return asked

    async def _judge(self, turn: _Played, results: Results) -> None:
        try:
            truth = await self._truth(turn)
        except TurnFailedError as error:
            results.add(error_row(turn.place, f"not judged: {error}"))
            return
        row = turn_row(turn.place, turn.asked, history=turn.history, truth=truth)
        results.add(row)

    async def _truth(self, turn: _Played) -> list[int]:
        """What one vLLM answers to this prompt: as it did, or asked afresh where a
        history has gone another way."""
        heard = turn.asked.heard
        prompt = tuple(heard.prompt_ids)
        if turn.place.variant is Variant.SINGLE:
            self._truths[prompt] = heard.token_ids
        if prompt not in self._truths:
            fresh = turn.body | {"cache_salt": uuid.uuid4().hex}
            ask = Ask(body=fresh, conversation="", is_final=True)
            answer = await self._single.way.ask(ask)
            self._truths[prompt] = answer.heard.token_ids
        return self._truths[prompt]
