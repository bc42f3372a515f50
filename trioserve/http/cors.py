"""Which web pages of other origins may call: the headers that tell their browsers."""

from __future__ import annotations

import re
from collections.abc import Sequence

Headers = tuple[tuple[str, str], ...]

METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, X-Trioserve-Ignored-Fields, WWW-Authenticate"
MAX_AGE_S = 600
NAMES = re.compile(r"[A-Za-z0-9_.-]+([ \t]*,[ \t]*[A-Za-z0-9_.-]+)*")
MAX_NAMES = 2000  # characters


class Cors:
    """The origins that may call; all of them with ``"*"``.

    What is said depends on the origin alone, never on the path asked for.
    """

    def __init__(self, origins: Sequence[str], *, credentials: bool) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)
        self._credentials = credentials

    def allows(self, origin: str) -> bool:
        """Whether pages of ``origin`` may call."""
        return self._any or origin in self._origins

    def headers(self, origin: str | None) -> Headers:
        """For every answer, also to requests without an origin: caches must tell them apart."""
        vary: Headers = () if self._any else (("Vary", "Origin"),)
        if origin is None or not self.allows(origin):
            return vary
        return (*vary, *self._allow(origin), ("Access-Control-Expose-Headers", EXPOSED))

    def preflight(self, origin: str, wanted_headers: str) -> Headers:
        """For the answer to an allowed origin's question what it may send."""
        names = wanted_headers if NAMES.fullmatch(wanted_headers) else ""
        asked: Headers = (("Access-Control-Allow-Headers", names),) if names else ()
        return (
            ("Vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
            *self._allow(origin),
            ("Access-Control-Allow-Methods", METHODS),
            *(asked if len(names) <= MAX_NAMES else ()),
            ("Access-Control-Max-Age", str(MAX_AGE_S)),
        )

    def _allow(self, origin: str) -> Headers:
        allowed: Headers = (("Access-Control-Allow-Origin", "*" if self._any else origin),)
        if self._credentials:
            allowed = (*allowed, ("Access-Control-Allow-Credentials", "true"))
        return allowed
