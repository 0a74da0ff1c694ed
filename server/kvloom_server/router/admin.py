"""What operators do to a running router: engines, and conversations' ends.

GET    /kvloom/engines                 all engines, and how they are
POST   /kvloom/engines                 {"role": "decode", "engine": "http://…"}
DELETE /kvloom/engines/{name}          it gets nothing new, and is forgotten
POST   /kvloom/engines/{name}/drain    no new turns; leases are still read
POST   /kvloom/engines/{name}/resume
DELETE /kvloom/conversations/{id}      its leases are released at once
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from kvloom_server.addresses import EngineSpec, parse_member

from .access import Caller
from .directory import Directory
from .ended import EndedConversations
from .engine import Engine, Role
from .engines import Engines
from .errors import BadRequestError
from .exchange import JSON, Exchange
from .feed import Feeds
from .identity import conversation_tag
from .membership import ADMIN, FLAGS, Entry
from .roster import Roster

MAX_BODY_BYTES: Final = 64 * 1024

Handler = Callable[[Exchange], Awaitable[str]]

_ENGINE: Final = re.compile(r"/kvloom/engines/([^/]+)(?:/(drain|resume))?")
_CONVERSATION: Final = re.compile(r"/kvloom/conversations/([^/]+)")


class _NewEngine(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    engine: str


class AdminApi:
    """Answers the requests above. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        feeds: Feeds,
        directory: Directory,
        ended: EndedConversations,
        roster: Roster,
    ) -> None:
        self._engines = engines
        self._feeds = feeds
        self._directory = directory
        self._ended = ended
        self._roster = roster

    def handler(self, method: str, path: str) -> Handler | None:
        """Who answers; ``None`` when nobody here does.

        Raises:
            BadRequestError: the path is ours, the method is not.
        """
        methods = self._methods(path)
        if methods is None:
            return None
        if method not in methods:
            raise BadRequestError(
                f"{path} takes {' or '.join(sorted(methods))}, not {method}",
                code="method_not_allowed",
                status=405,
            )
        return methods[method]

    def _methods(self, path: str) -> dict[str, Handler] | None:
        if path == "/kvloom/engines":
            return {"GET": self._list, "POST": self._add}
        if found := _ENGINE.fullmatch(path):
            name, verb = found.groups()
            if verb is None:
                return {"DELETE": self._on(name, self._remove)}
            is_draining = verb == "drain"
            return {"POST": self._on(name, self._drain, is_draining=is_draining)}
        if found := _CONVERSATION.fullmatch(path):
            return {"DELETE": self._ending(found[1])}
        return None

    # --- engines

    async def _list(self, client: Exchange) -> str:
        shown = [self._shown(engine) for engine in self._engines]
        return await _reply(client, {"engines": shown})

    async def _add(self, client: Exchange) -> str:
        body = await client.read(MAX_BODY_BYTES, idle_s=30.0)
        try:
            new = msgspec.json.decode(body, type=_NewEngine)
            spec = parse_member(new.engine)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise BadRequestError(
                f'{error}; send {{"role": "decode", "engine": "http://host:port"}}',
                code="invalid_engine",
            ) from None
        if not isinstance(spec, EngineSpec):
            raise BadRequestError(
                "Names that resolve to engines go into the flags or the engines file",
                code="invalid_engine",
            )
        entry = Entry(role=new.role, spec=spec)
        known = self._roster.entries(ADMIN)
        if entry not in known:
            self._roster.say(ADMIN, (*known, entry))
        engine = self._roster.engine_of(entry)
        if engine is None:
            self._roster.say(ADMIN, known)
            raise _conflict(f"another source names {spec.identity} otherwise")
        await self._engines.check(engine)
        return await _reply(client, self._shown(engine), status=201)

    async def _remove(self, client: Exchange, engine: Engine) -> str:
        sources = self._roster.sources_of(engine)
        fixed = [source for source in sources if source not in (ADMIN, FLAGS)]
        if fixed:
            raise _conflict(f"{engine.name} comes from the {fixed[0]}: remove it there")
        for source in sources:
            left = [
                entry
                for entry in self._roster.entries(source)
                if not _is(entry, engine)
            ]
            if len(left) == len(self._roster.entries(source)):
                raise _conflict(f"{engine.name} comes from a name in DNS")
            self._roster.say(source, left)
        return await _reply(client, {"removed": engine.name})

    async def _drain(
        self, client: Exchange, engine: Engine, *, is_draining: bool
    ) -> str:
        engine.standing.is_draining = is_draining
        self._engines.room()
        return await _reply(client, self._shown(engine))

    def _on(
        self, name: str, act: Callable[..., Awaitable[str]], **more: Any
    ) -> Handler:
        async def answer(client: Exchange) -> str:
            engine = self._engines.find(name)
            if engine is None:
                raise BadRequestError(
                    f"There is no engine {name!r}: GET /kvloom/engines lists them",
                    code="engine_not_found",
                    status=404,
                )
            return await act(client, engine, **more)

        return answer

    def _shown(self, engine: Engine) -> dict[str, Any]:
        return {
            "name": engine.name,
            "role": engine.role,
            "url": engine.spec.url,
            "lease": engine.spec.lease_address,
            "rank": engine.spec.rank,
            "sources": self._roster.sources_of(engine),
            "condition": engine.condition,
            "draining": engine.standing.is_draining,
            "in_flight": engine.num_in_flight,
            "conversations": self._directory.num_bound(engine.name),
            "leases": self._directory.num_leases(engine.name),
            "models": sorted(engine.models),
        }

    # --- conversations

    def _ending(self, conversation: str) -> Handler:
        async def answer(client: Exchange) -> str:
            query = parse_qs(client.query)
            tenant = client.tenant
            if client.is_admin:
                tenant = query.get("tenant", [""])[0]
            # The client's word for the model is part of a conversation's name.
            models = query.get("model") or ["", *self._engines.model_names()]
            ended = [
                self._ended.end(
                    conversation_tag(
                        tenant=tenant, model=model, conversation=conversation
                    )
                )
                for model in models
            ]
            return await _reply(client, {"ended": any(ended)})

        return answer


def let_in(client: Exchange, caller: Caller) -> None:
    """Note on the request who it is from."""
    client.tenant, client.is_admin = caller.tenant, caller.is_admin


def _is(entry: Entry, engine: Engine) -> bool:
    return (
        entry.role is engine.role
        and isinstance(entry.spec, EngineSpec)
        and entry.spec.identity == engine.spec.identity
    )


def _conflict(why: str) -> BadRequestError:
    return BadRequestError(why, code="engine_conflict", status=409)


async def _reply(client: Exchange, value: object, *, status: int = 200) -> str:
    await client.reply(status, (JSON,), msgspec.json.encode(value))
    return "ok"
