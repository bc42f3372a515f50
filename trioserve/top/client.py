"""The smallest HTTP client that can ask a server for a document: one GET, one connection."""

from __future__ import annotations

import errno
import os
import ssl
from urllib.parse import urlsplit

import attrs
import h11
import trio

from trioserve.logs import escape

TIMEOUT_S = 5.0
MAX_BODY_BYTES = 4 * 1024 * 1024
RECEIVE_BYTES = 64 * 1024
KEY_VARIABLE = "TRIOSERVE_API_KEY"


class Unreachable(Exception):
    """The server did not give what it was asked for; one line says why."""


@attrs.frozen
class Address:
    """Where a server is: a unix socket, or a host and a port, perhaps behind a path prefix."""

    host: str = "localhost"
    port: int = 80
    uds: str | None = None
    tls: bool = False
    prefix: str = ""
    api_key: str | None = attrs.field(default=None, repr=False)

    @property
    def authority(self) -> str:
        """The Host header's value."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"http{'s' * self.tls}://{self.authority}{self.prefix}"


def parse_url(url: str, api_key: str | None = None) -> Address:
    """The address of ``http[s]://host[:port][/prefix]``; without a scheme it is http.

    Raises:
        ValueError: it is no such thing; one line says why.
    """
    expected = f"{url!r}: expected http://HOST:PORT"
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError(expected)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if not host or parts.scheme not in ("http", "https"):
        raise ValueError(expected)
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{expected} and nothing more")
    tls = parts.scheme == "https"
    port = port or (443 if tls else 80)
    return Address(host, port, None, tls, parts.path.rstrip("/"), api_key)


async def fetch(address: Address, path: str) -> bytes:
    """The body at ``path``. Cancellation closes the connection.

    Raises:
        Unreachable: nobody answers, or not with 200.
    """
    try:
        with trio.fail_after(TIMEOUT_S):
            stream = await connect(address)
            try:
                return await get(stream, address, path)
            finally:
                await trio.aclose_forcefully(stream)
    except trio.TooSlowError:
        raise Unreachable(f"no answer within {TIMEOUT_S:g} s") from None
    except trio.BrokenResourceError as error:
        raise Unreachable(reason(error)) from error
    except OSError as error:
        raise Unreachable(reason(error)) from error
    except h11.RemoteProtocolError as error:
        raise Unreachable(f"what answers does not speak HTTP: {error}") from error


async def connect(address: Address) -> trio.abc.Stream:
    """Open a connection. Raises OSError; ssl errors are of that kind."""
    if address.uds is not None:
        return await trio.open_unix_socket(address.uds)
    if not address.tls:
        return await trio.open_tcp_stream(address.host, address.port)
    stream = await trio.open_ssl_over_tcp_stream(
        address.host,
        address.port,
        https_compatible=True,
        ssl_context=ssl.create_default_context(),
    )
    try:
        await stream.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def get(stream: trio.abc.Stream, address: Address, path: str) -> bytes:
    """One request and its answer on a connection that is used for nothing else."""
    http = h11.Connection(h11.CLIENT)
    headers = [("Host", address.authority), ("Connection", "close"), ("User-Agent", "trioserve")]
    if address.api_key is not None:
        headers.append(("x-api-key", address.api_key))
    request = h11.Request(method="GET", target=address.prefix + path, headers=headers)
    await stream.send_all((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
    body = bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
        elif isinstance(event, h11.Response) and event.status_code == 401:
            wants = "wants an" if address.api_key is None else "does not know the"
            raise Unreachable(f"the server {wants} API key; give one of its own in {KEY_VARIABLE}")
        elif isinstance(event, h11.Response) and event.status_code != 200:
            raise Unreachable(f"{path} answers with {event.status_code}: is it a trioserve server?")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise Unreachable(f"{path} has more than {MAX_BODY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)


def reason(error: BaseException) -> str:
    """Why a connection failed, in the system's words where there are any."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):
            seen = seen.exceptions[0]  # one of the host's addresses for all
        elif isinstance(seen, OSError) and seen.errno in errno.errorcode:
            return os.strerror(seen.errno)  # type: ignore[arg-type]  # a key of it, so an int
        elif isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        else:
            seen = seen.__cause__
    return escape(str(error)) or "the connection broke"
