"""The one place every request passes before it is routed: keys, and pages of other origins.

Closed by default: a path that is not in the short list of open ones needs a key, whether or not
there is such a route.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import trio

from trioserve.errors import ConfigError, RequestError
from trioserve.http.auth import ApiKeys, Unauthorized
from trioserve.http.cors import Cors, Headers

if TYPE_CHECKING:
    from trioserve.config.schema import HttpConfig
    from trioserve.http.listeners import Listener

log = logging.getLogger(__name__)

ALWAYS_OPEN = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""What probes ask, who have no key; it tells nobody more than a connection does."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
TOLD_S = 10.0  # between two lines about refused keys


class CrossOrigin(RequestError):
    """A web page of another origin asks for something to be done. The guard answers with it."""

    status: ClassVar[int] = 403
    default_code: ClassVar[str] = "cross_origin"


@attrs.frozen
class Verdict:
    """What becomes of a request.

    Attributes:
        refusal: the answer to a request that goes no further.
        preflight: the request asked what may be sent, and ``headers`` are the whole answer.
        headers: further ones of the answer.
    """

    refusal: RequestError | None = None
    preflight: bool = False
    headers: Headers = ()


PASSED = Verdict()


class Guard:
    """Judges each request of one server by its head.

    Args:
        keys: the API keys.
        cors: the origins that may call, or None.
        open_routes: paths answered without a key, beside those that always are.
    """

    def __init__(
        self, keys: ApiKeys, cors: Cors | None = None, open_routes: Sequence[str] = ()
    ) -> None:
        self.keys = keys
        self._cors = cors
        self._open = ALWAYS_OPEN.union(open_routes)
        self._num_refused = 0
        self._told_s = -math.inf

    @classmethod
    def from_config(cls, http: HttpConfig) -> Guard:
        """The guard that the configuration asks for.

        Raises:
            ConfigError: the file of keys cannot be used.
        """
        cors = None
        if http.cors_origins:
            cors = Cors(http.cors_origins, credentials=http.cors_credentials)
        return cls(ApiKeys(http.api_keys, http.api_keys_file), cors, http.open_routes)

    @property
    def open_paths(self) -> frozenset[str] | None:
        """What is answered without a key, or None where no key is asked for."""
        return self._open if self.keys.asked_for else None

    def judge(self, scope: Any) -> Verdict:
        """What becomes of the request with this ASGI scope. Never waits."""
        authorization: list[bytes] = []
        x_api_key: list[bytes] = []
        origin: str | None = None
        host = wanted_headers = ""
        asks = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization.append(value)
            elif name == b"x-api-key":
                x_api_key.append(value)
            elif name == b"origin":
                origin = value.decode("latin1")
            elif name == b"host":
                host = value.decode("latin1")
            elif name == b"access-control-request-method":
                asks = True
            elif name == b"access-control-request-headers":
                wanted_headers = value.decode("latin1")
        headers: Headers = ()
        if (cors := self._cors) is not None:
            if asks and scope["method"] == "OPTIONS" and origin and cors.allows(origin):
                return Verdict(preflight=True, headers=cors.preflight(origin, wanted_headers))
            headers = cors.headers(origin)
        refusal: RequestError | None = None
        if self.keys.asked_for and scope["path"] not in self._open:
            refusal = self.keys.refuse(authorization, x_api_key)
            if refusal is not None:
                self._tell(scope)
        elif origin is not None and scope["method"] not in SAFE_METHODS:
            refusal = self._judge_origin(scope, origin, host)
        if refusal is None:
            return Verdict(headers=headers) if headers else PASSED
        if isinstance(refusal, Unauthorized):
            headers = (*headers, ("WWW-Authenticate", refusal.challenge))
        return Verdict(refusal, headers=headers)

    def _judge_origin(self, scope: Any, origin: str, host: str) -> RequestError | None:
        """Whether a page may have something done that no key guards.

        Browsers send such requests for any page and only keep the answer from it. A page is our
        own if it came from the name it asks; on a loopback address that name must be one that
        nobody in the world can make stand for it.
        """
        if self._cors is not None and self._cors.allows(origin):
            return None
        own = origin.partition("://")[2].lower() == host.lower() != ""
        if own and (not _on_loopback(scope.get("server")) or _is_local_name(host)):
            return None
        return CrossOrigin(
            "pages of other origins may not do this; list the origin in http.cors_origins, or set"
            " http.api_keys"
        )

    def _tell(self, scope: Any) -> None:
        self._num_refused += 1
        now = trio.current_time()
        if now < self._told_s + TOLD_S:
            return
        client = scope.get("client")
        log.warning(
            "%d requests without a valid API key; the last from %s",
            self._num_refused,
            client[0] if client else "a unix socket",
        )
        self._num_refused, self._told_s = 0, now


def check_exposure(listeners: Sequence[Listener], guard: Guard, *, admin: bool) -> None:
    """Say that the server is open to the network without a key, if it is.

    Raises:
        ConfigError: so are its control routes.
    """
    if guard.keys.asked_for:
        return
    names = [listener.socket.getsockname() for listener in listeners]
    exposed = [name[0] for name in names if isinstance(name, tuple) and not _on_loopback(name)]
    if not exposed:
        return
    where = ", ".join(exposed)
    if admin:
        raise ConfigError(
            f"http.admin = true on {where} needs http.api_keys or http.api_keys_file: anybody who"
            " reaches the port could stop the server"
        )
    log.warning(
        "listening on %s without an API key: anybody who reaches the port can use the model; set"
        " http.api_keys",
        where,
    )


def _on_loopback(address: Any) -> bool:
    """Whether an address of a socket is reached from this machine alone; a unix socket's is."""
    if not address:
        return True
    try:
        ip = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _is_local_name(host: str) -> bool:
    """Whether a Host header names this machine, or an address, by what no public name can be."""
    name = host.lower()
    if name.startswith("["):
        return True
    name = name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
