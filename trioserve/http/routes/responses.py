"""``/v1/responses``: made, read again, cancelled, deleted."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, cast

import orjson
import trio
from quart import request

from trioserve.errors import InvalidRequest
from trioserve.http.asgi import App
from trioserve.http.bodies import printable_names
from trioserve.http.fields import shown
from trioserve.http.generation import GenerationCall, GenerationService, Order
from trioserve.http.reply import Reply, json_reply
from trioserve.http.request_state import request_state
from trioserve.http.responses.background import BackgroundResponses, EventLog, LogStream, Run
from trioserve.http.responses.items import Item, with_ids
from trioserve.http.responses.prompt import fit_prompt
from trioserve.http.responses.render import Draft, Head, ResponsesRenderer
from trioserve.http.responses.schema import INCLUDABLE, ResponsesRequest, parse_responses
from trioserve.http.responses.store import Kept, ResponseNotFound, ResponseStore, Turn
from trioserve.http.sampling_fields import Rules
from trioserve.http.sse import HEADERS

log = logging.getLogger(__name__)

LONG_CONVERSATION_BYTES = 256 * 1024
MAX_LISTED, DEFAULT_LISTED = 100, 20


def register(app: App) -> None:
    """Add the routes."""
    routes = ResponseRoutes(GenerationService(app.context))
    app.add_prompt_route("/v1/responses", "responses_create", routes.create)
    one = "/v1/responses/<response_id>"
    for rule, method, view in (
        (one, "GET", routes.retrieve),
        (one, "DELETE", routes.delete),
        (f"{one}/cancel", "POST", routes.cancel),
        (f"{one}/input_items", "GET", routes.input_items),
    ):
        endpoint = f"responses_{view.__name__}"
        app.add_url_rule(rule, endpoint, view_func=cast(Any, view), methods=[method])


class ResponseRoutes:
    """Handlers of one app, and owner of the responses it keeps.

    A response is in ``_background`` while a task of the server's makes it, and in the store once
    it has ended; one that its own client waits for is nowhere before its end.
    """

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._engine = service.context.engine
        self._http = http = service.context.config.http
        self._store = ResponseStore(http.max_stored_responses, http.max_stored_response_bytes)
        self._background = BackgroundResponses(service, self._keep_run)

    # ----------------------------------------------------------------------------- making

    async def create(self) -> Reply:
        """Answer a POST to ``/v1/responses``."""
        call = self._service.open()
        rules = Rules.of(self._http, self._engine.generation_defaults)
        body = await call.read(functools.partial(parse_responses, rules=rules))
        stem = secrets.token_hex(16)
        call.call_answer(stem)
        draft = Draft(
            Head(
                stem=stem,
                created=int(time.time()),
                model=self._engine.served_names[0],
                body=body,
                sampling=body.sampling,
                stored=self._is_stored(body),
            )
        )
        turn = Turn.of(self._previous(body), with_ids(body.items, stem))
        order = Order(
            prompts=[await call.run(functools.partial(self._prompt, body, turn))],
            samplings=[body.sampling],
            priority=body.priority,
            cache_salt=body.cache_salt,
            prompt_field="input",
            max_tokens_field="max_output_tokens",
        )
        if body.background:
            return await self._start(call, draft, turn, order)
        call.submit(order)
        keep = functools.partial(self._keep, draft, turn)
        renderer = ResponsesRenderer(draft, keep)
        if body.stream:
            return await call.stream(renderer)
        [choice] = await call.collect()
        draft.take(choice)
        final = draft.finished(call.usage())
        keep(final)
        return call.respond(orjson.dumps(final))

    async def _prompt(self, body: ResponsesRequest, turn: Turn) -> list[int]:
        return await fit_prompt(self._engine, body, await self._decoded(turn, turn.items))

    async def _decoded(self, turn: Turn, items: Callable[[], list[Item]]) -> list[Item]:
        """Items of a conversation, decoded in a thread if it is long. Cancellation abandons it."""
        if turn.conversation_bytes < LONG_CONVERSATION_BYTES:
            return items()
        threads = self._service.context.parsing
        return await trio.to_thread.run_sync(items, abandon_on_cancel=True, limiter=threads)

    async def _start(self, call: GenerationCall, draft: Draft, turn: Turn, order: Order) -> Reply:
        run = await self._background.start(call.id, draft, turn, order)
        request_state().accepted = True
        if run.log is None:
            return call.respond(orjson.dumps(run.snapshot()))
        reply = self._follow(run.log, 0)
        if ignored := draft.head.body.ignored:
            reply.headers["X-Trioserve-Ignored-Fields"] = printable_names(ignored)
        return reply

    def _is_stored(self, body: ResponsesRequest) -> bool:
        if (body.store or body.background) and not self._store.enabled:
            raise InvalidRequest(
                "responses are not stored here (http.max_stored_responses = 0); leave it out",
                param="background" if body.background else "store",
            )
        return self._store.enabled if body.store is None else body.store

    def _previous(self, body: ResponsesRequest) -> Turn | None:
        name = "previous_response_id"
        if (id := body.previous_response_id) is None:
            return None
        if self._background.get(id) is not None:
            raise InvalidRequest("the response to go on from has not ended yet", param=name)
        try:
            previous = self._store.get(id)
        except ResponseNotFound as error:
            code = "previous_response_not_found"
            raise InvalidRequest(error.message, param=name, code=code) from None
        if previous.status not in ("completed", "incomplete"):
            raise InvalidRequest(f"the response to go on from is {previous.status}", param=name)
        return previous.turn

    # ---------------------------------------------------------------------------- keeping

    def _keep_run(self, run: Run) -> None:
        if run.final is not None:
            self._keep(run.draft, run.turn, run.final, run.log)

    def _keep(
        self, draft: Draft, turn: Turn, final: dict[str, Any], events: EventLog | None = None
    ) -> None:
        if not draft.head.stored:
            return
        kept = Kept(
            draft.head.id,
            orjson.dumps(final),
            final["status"],
            draft.head.body.background,
            turn.answered(final["output"]),
            tuple(events.events) if events is not None else None,
        )
        if not self._store.put(kept):
            log.warning(
                "response %s is not kept: it is larger than http.max_stored_response_bytes", kept.id
            )

    async def retrieve(self, response_id: str) -> Reply:
        """One response as it is now, or its events from one on."""
        _check_include()
        stream, first = _flag("stream"), _number("starting_after", -1) + 1
        if _flag("include_obfuscation"):
            raise InvalidRequest("events have no obfuscation", param="include_obfuscation")
        if stream:
            return self._follow(self._events(response_id), first)
        run = self._background.get(response_id)
        if run is not None:
            return json_reply(run.snapshot())
        return Reply(self._store.get(response_id).raw)

    def _events(self, id: str) -> EventLog:
        run = self._background.get(id)
        events = run.log if run is not None else EventLog.of(self._store.get(id))
        if events is None:
            raise InvalidRequest(
                "the response was not made with background and stream, so its events are not kept",
                param="stream",
            )
        return events

    def _follow(self, events: EventLog, first: int) -> Reply:
        request_state().exchange.declare(streams=True)
        return Reply(LogStream(events, first, self._http.heartbeat_s), headers=dict(HEADERS))

    async def cancel(self, response_id: str) -> Reply:
        """End a background response; one that has ended stays as it is."""
        run = self._background.get(response_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()
            return json_reply(run.snapshot())
        kept = self._store.get(response_id)
        if not kept.background:
            raise InvalidRequest(
                "only responses made with background can be cancelled; to end another, close its"
                " connection",
                param="response_id",
            )
        return Reply(kept.raw)

    async def delete(self, response_id: str) -> Reply:
        """Forget a response, ending its work if it is still made."""
        run = self._background.get(response_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()
        else:
            self._store.get(response_id)
        self._store.discard(response_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, response_id: str) -> Reply:
        """The items a response was made from, those of the conversation before it included."""
        run = self._background.get(response_id)
        turn = (run if run is not None else self._store.get(response_id)).turn
        items = await self._decoded(turn, turn.given)
        if _choice("order", "desc", "asc", "desc") == "desc":
            items.reverse()
        if (after := request.args.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(f"no item {shown(after)} here", param="after")
            items = items[ids.index(after) + 1 :]
        limit = _number("limit", DEFAULT_LISTED, low=1, high=MAX_LISTED)
        page = items[:limit]
        return json_reply(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )


# ------------------------------------------------------------------------------- the query


def _choice(name: str, default: str, *choices: str) -> str:
    value = request.args.get(name, default)
    if value not in choices:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(choices)}, not {shown(value)}", param=name
        )
    return value


def _flag(name: str) -> bool:
    return _choice(name, "false", "true", "false") == "true"


def _check_include() -> None:
    # A kept response shows all that it was made with, so there is nothing to add.
    for name in (*request.args.getlist("include"), *request.args.getlist("include[]")):
        if name not in INCLUDABLE:
            raise InvalidRequest(
                f"include: {shown(name)} is not known; known: {', '.join(INCLUDABLE)}",
                param="include",
            )


def _number(name: str, default: int, *, low: int = 0, high: int = 2**31) -> int:
    text = request.args.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(f"{name} must be a whole number, not {shown(text)}", param=name)
    if not low <= int(text) <= high:
        raise InvalidRequest(f"{name} must lie between {low} and {high}, not {text}", param=name)
    return int(text)
