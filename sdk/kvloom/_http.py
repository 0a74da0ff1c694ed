"""What kvloom's HTTP clients do to a request, for httpx and httpx2 alike.

The client is the library's own in all else: proxies of the environment, mounts,
pools and limits are untouched, because nothing is put in a transport's place.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from ._arguments import taken
from ._byte_stream import follow
from ._carry import Attachment, Carrier, Ticket
from ._follow import Follower
from ._outgoing import GENERATION_PATHS, Outgoing, attempt_in
from .protocol import PLAN_HEADER, PlanReport

_TICKET: Final = "kvloom_http"
"""Where a request keeps its ticket (never on the wire)."""

_SEEN_TO: Final = "kvloom"
"""Where kvloom's OpenAI clients keep theirs: they have seen to the request."""


class SyncCarrying:
    """The two methods that make a library's client one of ours.

    Args:
        options: the library's own, and ``kvloom_namespace``, ``kvloom_store``,
            ``kvloom_carry``, ``kvloom_dialect``, ``kvloom_returns``,
            ``kvloom_hints``, ``kvloom_events`` and ``kvloom_clock``, as in
            :class:`kvloom.openai.OpenAI`.

    Raises:
        TypeError: one of ours is not there, or is not of its type.
        ValueError: one of ours has a value that it cannot have.
    """

    def __init__(self, **options: Any) -> None:
        self._carrier, rest = taken(options)
        super().__init__(**rest)

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """As the library's own; a turn's request goes with its conversation."""
        parent: Any = super()
        request = prepared(request, self._carrier, defaults=parent.headers)
        try:
            response = parent.send(request, stream=True, **options)
        except BaseException as error:
            failed(request, self._carrier, error)
            raise
        try:
            followed(response, self._carrier)
            if not stream:
                response.read()
        except BaseException:
            response.close()
            raise
        return response


class AsyncCarrying:
    """As :class:`SyncCarrying`, for a library's asynchronous client."""

    def __init__(self, **options: Any) -> None:
        self._carrier, rest = taken(options)
        super().__init__(**rest)

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """As the library's own; a turn's request goes with its conversation."""
        parent: Any = super()
        request = prepared(request, self._carrier, defaults=parent.headers)
        try:
            response = await parent.send(request, stream=True, **options)
        except BaseException as error:
            failed(request, self._carrier, error)
            raise
        try:
            followed(response, self._carrier)
            if not stream:
                await response.aread()
        except BaseException:
            await response.aclose()
            raise
        return response


def prepared(request: Any, carrier: Carrier, *, defaults: Mapping[str, str]) -> Any:
    """``request`` itself, or a copy that carries its conversation.

    The body's own bytes stay as they are; what is added stands before them.

    Args:
        defaults: the headers of the client, which are in each of its requests.
    """
    outgoing = _outgoing(request, defaults)
    if outgoing is None:
        return request
    attachment = carrier.attach(outgoing)
    if attachment.ticket.key is None:
        return request
    return _carrying(request, attachment)


def followed(response: Any, carrier: Carrier) -> None:
    """Has the answer to a prepared request read along as it is read."""
    ticket = response.request.extensions.get(_TICKET)
    is_ours = isinstance(ticket, Ticket) and ticket.named is not None
    if not is_ours:
        return
    if response.is_error:
        error = HTTPStatusError(f"HTTP {response.status_code}")
        status = response.status_code
        carrier.failed(ticket.named, ticket.attempt, error=error, status=status)
        return
    ticket.plan = PlanReport.decode_header(response.headers.get(PLAN_HEADER, ""))
    kind = response.headers.get("content-type", "")
    follower = Follower(
        carrier,
        ticket,
        is_events="event-stream" in kind,
        is_parsed=False,
        encoding=response.headers.get("content-encoding", ""),
    )
    if response.is_stream_consumed:  # by a transport that never was on a wire
        follower.feed(response.content)
        follower.end()
        follower.close()
    else:
        follow(response, follower)


def failed(request: Any, carrier: Carrier, error: BaseException) -> None:
    """Tells that a prepared request got no answer."""
    ticket = request.extensions.get(_TICKET)
    if isinstance(ticket, Ticket) and ticket.named is not None:
        carrier.failed(ticket.named, ticket.attempt, error=error, status=None)


class HTTPStatusError(Exception):
    """A server's refusal; never raised, its name stands in an event."""


def _outgoing(request: Any, defaults: Mapping[str, str]) -> Outgoing | None:
    # The longest: "/completions" also ends "/chat/completions".
    paths = (path for path in GENERATION_PATHS if request.url.path.endswith(path))
    path = max(paths, key=len, default=None)
    if path is None or request.method != "POST" or _SEEN_TO in request.extensions:
        return None
    body = _body_of(request)
    if body is None:
        return None
    endpoint = str(request.url.copy_with(query=None)).removesuffix(path)
    return Outgoing(
        endpoint=endpoint,
        path=path,
        headers={k: v for k, v in request.headers.items() if defaults.get(k) != v},
        default_headers=defaults,
        body=body,
        attempt=attempt_in(request.headers),
    )


def _carrying(request: Any, attachment: Attachment) -> Any:
    anew = {b"content-length", *(name.lower().encode() for name in attachment.headers)}
    headers = [
        (name, value) for name, value in request.headers.raw if name.lower() not in anew
    ]
    added = [(k.encode(), v.encode()) for k, v in attachment.headers.items()]
    return type(request)(
        request.method,
        request.url,
        headers=headers + added,
        content=_spliced(request.content, attachment.body),
        extensions={**request.extensions, _TICKET: attachment.ticket},
    )


def _spliced(content: bytes, added: Mapping[str, object]) -> bytes:
    if not added:
        return content
    start = content.index(b"{") + 1
    is_empty = content[start:].lstrip().startswith(b"}")
    members = json.dumps(added, separators=(",", ":"))[1:-1].encode()
    comma = b"" if is_empty else b","
    return content[:start] + members + comma + content[start:]


def _body_of(request: Any) -> Mapping[str, object] | None:
    """The JSON object in a request, or ``None`` when it is nothing of the kind."""
    try:
        body = json.loads(request.content)
    except (RuntimeError, ValueError):  # a body that is still to be read, or no JSON
        return None
    return body if isinstance(body, Mapping) else None
