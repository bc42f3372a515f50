"""Request bodies: read, held to their media type, decoded where they do not make others wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio
from werkzeug.http import parse_options_header

from trioserve.http.errors import WrongMediaType
from trioserve.http.fields import SMALL_BODY_BYTES, takes_long
from trioserve.http.reply import JSON
from trioserve.http.request_state import RequestState

MAX_LOGGED = 200  # characters of client-chosen names in a log line or header

B = TypeVar("B")


def read_small(state: RequestState, parse: Callable[[bytes], B]) -> B | None:
    """A request's body, parsed, if it is here and small; else None, for ``read_body``.

    Raises:
        WrongMediaType: the body is not said to be JSON in UTF-8.
        RequestEntityTooLarge: it is longer than is allowed.
        RequestError: whatever ``parse`` raises.
    """
    if not state.body.is_here or state.body.num_bytes > SMALL_BODY_BYTES:
        return None
    _check_media_type(state)
    return parse(_noted(state, state.body.take()))


async def read_body(
    state: RequestState, parse: Callable[[bytes], B], threads: trio.CapacityLimiter
) -> B:
    """Read a request's body and parse it, in a thread if that takes long.

    Cancellation abandons the thread, whose result is dropped.

    Raises:
        WrongMediaType: the body is not said to be JSON in UTF-8.
        RequestEntityTooLarge, RequestTimeout: as ``RequestBody.read``.
        RequestError: whatever ``parse`` raises.
    """
    _check_media_type(state)
    raw = _noted(state, await state.body.read())
    if not takes_long(raw):
        return parse(raw)
    return await trio.to_thread.run_sync(parse, raw, abandon_on_cancel=True, limiter=threads)


def _noted(state: RequestState, raw: bytes) -> bytes:
    if state.record is not None:
        state.record.take_body(raw)
    return raw


def _check_media_type(state: RequestState) -> None:
    given = state.header(b"content-type")
    kind, options = (given, {}) if given == JSON else parse_options_header(given)
    kind = kind.lower()
    if kind and kind != JSON and not kind.endswith("+json"):
        raise WrongMediaType(f"the body must be application/json, not {kind[:100]}")
    charset = options.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise WrongMediaType(f"the body must be UTF-8, not {charset[:100]}")
    if state.header(b"content-encoding", "identity").lower() != "identity":
        raise WrongMediaType("compressed bodies are not supported; send it as it is")


def printable_names(names: tuple[str, ...]) -> str:
    """Names chosen by a client as printable ASCII of bounded length."""
    text = ", ".join(ascii(name)[1:-1] for name in names)
    return text if len(text) <= MAX_LOGGED else text[: MAX_LOGGED - 3] + "..."
