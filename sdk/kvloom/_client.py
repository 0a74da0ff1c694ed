"""What kvloom's OpenAI clients do that openai's own do not.

openai has no public hook that sees a request's JSON before it is serialised, a
streamed chunk before it is typed, or a response before it is read. The private ones
that are overridden here are the same in 2.45 and 3.57, and tests say so first.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar

import anyio
import tenacity
from openai import OpenAIError
from openai._base_client import BaseClient
from openai._compat import model_copy
from openai._constants import RAW_RESPONSE_HEADER
from openai._models import FinalRequestOptions

from . import _retry
from ._arguments import taken
from ._byte_stream import follow
from ._carry import Carrier, Ticket
from ._conversation import Conversation, conversation
from ._follow import Follower, StreamError
from ._interrupted import interruption
from ._outgoing import GENERATION_PATHS, Named, Outgoing
from ._spoken import note
from .protocol import PLAN_HEADER, PlanReport, is_conversation_id

_TICKET: Final = "kvloom"
"""Where the transport's request keeps its ticket (never on the wire)."""

_T = TypeVar("_T")


class Carrying(BaseClient[Any, Any]):
    """The part of a client that is the same for sync and async."""

    _carrier: Carrier

    def _take(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Takes our arguments, and returns openai's."""
        self._carrier, rest = taken(options)
        return rest

    @contextmanager
    def conversation(self, thread: str, *, lane: str = "") -> Iterator[str]:
        """Requests in this block are turns of one conversation.

        It holds for every kvloom client in the block, copies of this one and
        all that is awaited or started there.

        Args:
            thread: your own id of the thread; it is hashed, never sent.
            lane: one chain of reasoning inside the thread, such as an agent's
                name where several agents share it.

        Returns:
            The conversation ID that is sent.

        Raises:
            TypeError: one of them is no string.
            ValueError: ``thread`` is empty.
        """
        namespace = self._carrier.namespace
        with conversation(thread, lane=lane, namespace=namespace) as named:
            yield named.id(default_namespace=namespace)

    def _end_url(self, conversation_id: str) -> str:
        # Part of a URL: "../engines/d0" would end something else.
        if not is_conversation_id(conversation_id):
            raise ValueError(
                f"{conversation_id[:40]!r} is no conversation ID: those that are sent "
                "have 8 to 128 letters, digits, - or _"
            )
        root = str(self.base_url).rstrip("/").removesuffix("/v1")
        return f"{root}/kvloom/conversations/{conversation_id}"

    def _id_of(self, thread: str, lane: str) -> str:
        named = Conversation(thread=thread, lane=lane)
        return named.id(default_namespace=self._carrier.namespace)

    def _build_request(
        self, options: FinalRequestOptions, *, retries_taken: int = 0
    ) -> Any:
        sending = _retry.sending_now()
        if sending is not None:
            retries_taken = max(retries_taken, sending.attempt)
        outgoing = self._outgoing(options, attempt=retries_taken)
        if outgoing is None:
            return super()._build_request(options, retries_taken=retries_taken)
        attachment = self._carrier.attach(outgoing)
        if attachment.headers:
            options.headers = {**_given(options.headers), **attachment.headers}
        if attachment.body:
            options.extra_json = {**(options.extra_json or {}), **attachment.body}
        request = super()._build_request(options, retries_taken=retries_taken)
        request.extensions[_TICKET] = attachment.ticket
        if attachment.ticket.named is not None:
            if sending is not None:
                sending.ticket = attachment.ticket
            namespace = self._carrier.namespace
            note(self, attachment.ticket.named.id, namespace=namespace)
        return request

    def _process_response_data(
        self, *, data: object, cast_to: type[_T], response: Any
    ) -> _T:
        ticket = ticket_of(response)
        if ticket is not None and isinstance(data, Mapping):
            plan = response.headers.get(PLAN_HEADER)
            data = self._carrier.capture(ticket, data, plan=plan)
        return super()._process_response_data(
            data=data, cast_to=cast_to, response=response
        )

    def _process_response(self, *, response: Any, stream: bool, **how: Any) -> Any:
        """Has the answer's bytes followed where the parser alone does not do."""
        ticket = ticket_of(response)
        if ticket is not None and ticket.key is not None:
            plan = response.headers.get(PLAN_HEADER, "")
            ticket.plan = PlanReport.decode_header(plan)
            how["retries_taken"] = ticket.attempt
            self._follow(response, ticket, is_stream=stream)
        parent: Any = super()
        return parent._process_response(response=response, stream=stream, **how)

    def _follow(self, response: Any, ticket: Ticket, *, is_stream: bool) -> None:
        is_raw = RAW_RESPONSE_HEADER in response.request.headers
        if not (is_raw or is_stream):
            return  # read already, and parsed next
        if response.is_stream_consumed:
            # What is there at once is read at once, whoever parses it later.
            self._take_in(response, ticket, is_stream=is_stream)
            return

        def translate(follower: Follower, cause: Exception | StreamError) -> Exception:
            return interruption(response.request, follower, cause)

        follower = Follower(
            self._carrier,
            ticket,
            is_events=is_stream or _has_events(response),
            is_parsed=not is_raw,
            encoding=response.headers.get("content-encoding", ""),
        )
        follow(response, follower, translate=None if is_raw else translate)

    def _take_in(self, response: Any, ticket: Ticket, *, is_stream: bool) -> None:
        """Takes in an answer that is there already."""
        is_events = is_stream or _has_events(response)
        follower = Follower(self._carrier, ticket, is_events=is_events, is_parsed=False)
        follower.feed(response.content)
        follower.end()
        follower.close()

    def _take_in_unparsed(self, response: Any) -> None:
        """Takes in an answer that its caller has as it came: as text, as bytes, as the
        HTTP library's response."""
        ticket = ticket_of(response)
        if ticket is None or ticket.key is None or ticket.is_over:
            return
        if response.is_stream_consumed:
            self._take_in(response, ticket, is_stream=False)

    def _outgoing(
        self, options: FinalRequestOptions, *, attempt: int
    ) -> Outgoing | None:
        body, path = options.json_data, _path_of(options.url)
        is_generation = path in GENERATION_PATHS
        if not (
            is_generation and options.method.lower() == "post" and _is_object(body)
        ):
            return None
        return Outgoing(
            endpoint=str(self.base_url),
            path=path,
            headers=_given(options.headers),
            default_headers=self._custom_headers,
            body={**body, **(options.extra_json or {})},
            attempt=attempt,
        )

    if not TYPE_CHECKING:  # the types are openai's own

        def copy(self, *, _extra_kwargs=MappingProxyType({}), **options):
            return super().copy(
                _extra_kwargs={"kvloom_carrier": self._carrier, **_extra_kwargs},
                **options,
            )

        with_options = copy

    def _named(self, options: FinalRequestOptions) -> Named | None:
        """The conversation of a request that is not built yet."""
        outgoing = self._outgoing(options, attempt=0)
        return None if outgoing is None else self._carrier.named(outgoing)

    def _once(self, options: FinalRequestOptions) -> FinalRequestOptions:
        """A request that openai sends once, with one key for all attempts."""
        once = model_copy(options)
        once.max_retries = 0
        once.idempotency_key = options.idempotency_key or self._idempotency_key()
        return once

    def _max_attempts(self, options: FinalRequestOptions) -> int | None:
        """``None`` when openai shall say what is wrong with ``max_retries``."""
        max_retries: object = options.get_max_retries(self.max_retries)
        is_count = isinstance(max_retries, int) and max_retries >= 0
        return max_retries + 1 if is_count else None  # type: ignore[operator]

    @contextmanager
    def _attempt(self, named: Named, attempt: int) -> Iterator[None]:
        """One sending of a request, and what becomes of it."""
        sending = _retry.Sending(attempt)
        try:
            with _retry.attempting(sending):
                yield
        except BaseException as error:
            status = getattr(error, "status_code", None)
            # An answer that came, and is not what its caller would parse, has ended.
            if sending.ticket is None or not sending.ticket.is_over:
                self._carrier.failed(named, attempt, error=error, status=status)
            if isinstance(error, OpenAIError):
                _retry.note_attempts(error, attempt + 1)
                _retry.note_no_connection(error)
            raise


class SyncCarrying(Carrying):
    """Repeats a turn's failed attempts, in the place of openai's own loop."""

    def end_conversation(self, thread: str, *, lane: str = "") -> bool:
        """Tells the router that a conversation is over, so that decode's memory
        is free for others at once.

        Args:
            thread: your own id of the thread, as in :meth:`conversation`.
            lane: the lane.

        Returns:
            Whether the router knew the conversation; ``False`` also behind
            servers that are no kvloom router (``kvloom_dialect``).

        Raises:
            TypeError: one of them is no string.
            ValueError: ``thread`` is empty.
            openai.APIError: the router did not do it.
        """
        return self.end_conversation_id(self._id_of(thread, lane))

    def end_conversation_id(self, conversation_id: str) -> bool:
        """As :meth:`end_conversation`, by the ID that is sent.

        Raises:
            ValueError: it is no ID that could have been sent.
            openai.APIError: the router did not do it.
        """
        if not self._carrier.is_ours:
            return False
        me: Any = self
        return _is_ended(me.delete(self._end_url(conversation_id), cast_to=object))

    if not TYPE_CHECKING:  # the types are openai's own

        def _process_response(self, *, response, **how):
            answer = super()._process_response(response=response, **how)
            self._take_in_unparsed(response)
            return answer

        def request(self, cast_to, options, **how):
            named, limit = self._named(options), self._max_attempts(options)
            send, attempts = super().request, count()
            if named is None or limit is None:
                return send(cast_to, options, **how)
            options = self._once(options)

            def once():
                with self._attempt(named, next(attempts)):
                    return send(cast_to, options, **how)

            plan = _retry.plan_of(limit, self._carrier.tell, time.sleep, _no_sleep)
            return tenacity.Retrying(**plan)(once)


class AsyncCarrying(Carrying):
    """Repeats a turn's failed attempts, in the place of openai's own loop."""

    async def end_conversation(self, thread: str, *, lane: str = "") -> bool:
        """As :meth:`SyncCarrying.end_conversation`."""
        return await self.end_conversation_id(self._id_of(thread, lane))

    async def end_conversation_id(self, conversation_id: str) -> bool:
        """As :meth:`end_conversation`, by the ID that is sent."""
        if not self._carrier.is_ours:
            return False
        me: Any = self
        url = self._end_url(conversation_id)
        return _is_ended(await me.delete(url, cast_to=object))

    if not TYPE_CHECKING:  # the types are openai's own

        async def _process_response(self, *, response, **how):
            answer = await super()._process_response(response=response, **how)
            self._take_in_unparsed(response)
            return answer

        async def request(self, cast_to, options, **how):
            named, limit = self._named(options), self._max_attempts(options)
            send, attempts = super().request, count()
            if named is None or limit is None:
                return await send(cast_to, options, **how)
            options = self._once(options)

            async def once():
                with self._attempt(named, next(attempts)):
                    return await send(cast_to, options, **how)

            # Of whatever loop this runs in: openai's clients run in trio's, too.
            sleep = anyio.sleep
            plan = _retry.plan_of(limit, self._carrier.tell, sleep, _no_async_sleep)
            return await tenacity.AsyncRetrying(**plan)(once)


def ticket_of(response: Any) -> Ticket | None:
    """The ticket of a response's request, if it is one of ours."""
    if response is None:
        return None
    ticket = response.request.extensions.get(_TICKET)
    return ticket if isinstance(ticket, Ticket) else None


def _has_events(response: Any) -> bool:
    return "event-stream" in response.headers.get("content-type", "")


def _is_ended(answer: object) -> bool:
    return isinstance(answer, Mapping) and bool(answer.get("ended"))


def _given(headers: object) -> Mapping[str, Any]:
    """The headers of a call, where openai marks absence in its own way."""
    return headers if isinstance(headers, Mapping) else {}


def _is_object(body: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(body, Mapping)


def _path_of(url: str) -> str:
    """openai takes a path with or without its slash."""
    return url if url.startswith("/") else f"/{url}"


def _no_sleep(_: float) -> None:
    """Tests do not wait."""


async def _no_async_sleep(_: float) -> None:
    """Tests do not wait."""
