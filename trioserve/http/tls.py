"""TLS: the certificate in use, read anew when its files change, and streams that speak it.

The stream is made from ssl's own parts and not from ``trio.SSLStream``: that one cannot end its
sending alone, which the last answer of a connection needs, and has no send that never waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import ssl
import stat
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from trioserve.errors import ConfigError
from trioserve.http.reloading import Reloaded
from trioserve.http.stream import ClientStream, StreamLike
from trioserve.ipc.framing import FEW_BYTES, next_read

if TYPE_CHECKING:
    from trioserve.config.schema import HttpConfig

log = logging.getLogger(__name__)

TOLD_S = 10.0  # between two lines about failed handshakes
GOODBYE_S = 1.0  # for the last record, of a client that may not be reading
_PLAIN_BODY = (
    b'{"error":{"message":"this port speaks HTTPS; use https:// in the URL",'
    b'"type":"invalid_request_error","param":null,"code":"plain_http"}}'
)
PLAIN_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_PLAIN_BODY), _PLAIN_BODY)
)


class Tls:
    """The TLS side of one server.

    Args:
        cert: PEM file with the certificate chain.
        key: PEM file with its private key; None: it is in the same file.
        client_ca: PEM file with the certificates of which one must have signed a client's; None:
            clients need no certificate.
        http2: whether HTTP/2 is offered.

    Raises:
        ConfigError: a file cannot be used; names it and the fault.
    """

    def __init__(self, cert: str, key: str | None, client_ca: str | None, *, http2: bool) -> None:
        self._files = (cert, key, client_ca)
        self._http2 = http2
        paths = [path for path in self._files if path is not None]
        self._context = Reloaded("TLS files", paths, self._make_context)
        self._num_failed = 0
        self._told_s = -math.inf

    @classmethod
    def from_config(cls, http: HttpConfig) -> Tls | None:
        """What the configuration asks for; None for plain HTTP. Raises as the class does."""
        if http.tls_cert is None:
            return None
        return cls(http.tls_cert, http.tls_key, http.tls_client_ca, http2=http.http2)

    def wrap(self, stream: StreamLike, send_timeout_s: float) -> TlsStream:
        """A client's stream, with the certificate of this moment."""
        return TlsStream(stream, send_timeout_s, self._context.get(), self)

    def note_failure(self, error: ssl.SSLError, client: object) -> None:
        """Say in the log, now and then, that a handshake failed."""
        self._num_failed += 1
        now = trio.current_time()
        if now >= self._told_s + TOLD_S:
            log.info(
                "%d TLS handshakes failed; the last, of %s: %s",
                self._num_failed,
                client,
                (error.reason or type(error).__name__).lower().replace("_", " "),
            )
            self._num_failed, self._told_s = 0, now

    def _make_context(self) -> ssl.SSLContext:
        cert, key, client_ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["h2", "http/1.1"] if self._http2 else ["http/1.1"])
        assert cert is not None
        _load_certificate(context, cert, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _check_pem("http.tls_client_ca", client_ca, b"CERTIFICATE")
            try:
                context.load_verify_locations(client_ca)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"http.tls_client_ca {client_ca}: {_reason(error)}; it takes PEM certificates"
                ) from None
        return context


class TlsStream(ClientStream):
    """A client's stream under TLS.

    One task reads and one at a time sends; either may have records of the other's to send, which go
    out in the order they were made. A client that ends the connection without saying so in TLS
    counts as gone: what it sent may have been cut.
    """

    is_tls = True

    def __init__(
        self, stream: StreamLike, send_timeout_s: float, context: ssl.SSLContext, tls: Tls
    ) -> None:
        super().__init__(stream, send_timeout_s)
        self._tls = tls
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._flushing = trio.Lock()
        self._rest = b""  # records that the kernel did not take yet, before those in _outgoing
        self._num_asked = FEW_BYTES
        self._ended = False

    async def start(self) -> None:
        """The handshake. Cancellation leaves a stream that can only be closed.

        Raises:
            trio.BrokenResourceError: it failed, or the client left.
        """
        try:
            while True:
                try:
                    self._object.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
        except ssl.SSLError as error:
            self._tls.note_failure(error, self._client())
            await self._say_why(error)
            raise trio.BrokenResourceError("the TLS handshake failed") from error
        await self._flush()

    def _client(self) -> str:
        with contextlib.suppress(OSError):
            if name := self.socket.getpeername():
                return str(name[0])
        return "a unix socket"

    async def _say_why(self, error: ssl.SSLError) -> None:
        """Send the alert, or an answer in plain HTTP to who asked in it."""
        if error.reason == "HTTP_REQUEST":
            self._outgoing.read()
            self._rest = PLAIN_ANSWER
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._flush()
            await self._stream.send_eof()
            # A reset by bytes that nobody read could overtake what was just sent.
            with trio.move_on_after(GOODBYE_S):
                while await self._stream.receive_some(FEW_BYTES):
                    pass

    @property
    def has_rest(self) -> bool:
        """Whether ``try_send`` took more than the kernel did; ``send_all`` sends the rest first."""
        return bool(self._rest)

    def try_send(self, data: bytes) -> int:
        """Take all of ``data`` and send what the kernel takes at once, or take nothing."""
        fileno = getattr(self.socket, "fileno", None)
        if fileno is None or self._rest or self._flushing.locked():
            return 0
        try:
            self._encrypt(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return 0  # ``send_all`` then says so
        records = self._outgoing.read()
        sent = 0
        with contextlib.suppress(OSError):  # the client is gone, or there is no room
            sent = os.write(fileno(), records)
        self._rest = records[sent:]
        return len(data)

    async def _write(self, data: bytes | memoryview) -> None:
        if data:
            self._encrypt(data)
        await self._flush()

    def _encrypt(self, data: bytes | memoryview) -> None:
        if self._ended:
            raise trio.ClosedResourceError
        view = memoryview(data)
        try:
            while view:
                view = view[self._object.write(view) :]
        except ssl.SSLError as error:
            self.abort()  # or the reader would wait on
            raise trio.BrokenResourceError("TLS ended") from error

    async def receive_some(self, max_bytes: int) -> bytes:
        """Some of what the client says; empty when it has said that it ends its sending.

        After ``send_eof`` nothing is understood any more, and records come as they are.

        Raises:
            trio.BrokenResourceError: it ended without saying so, or what it sent is no TLS.
        """
        while True:
            if self._ended:
                return bytes(await self._stream.receive_some(max_bytes))
            try:
                data = self._object.read(max_bytes)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError as error:
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._flush()
                raise trio.BrokenResourceError("TLS was broken") from error
            else:
                await self._flush()
                return data

    async def send_eof(self) -> None:
        """Say that nothing follows, in TLS and to the kernel. Idempotent.

        Waits a moment at most, where the client takes nothing.
        """
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ssl.SSLError):  # it would wait for the client to say the same
            self._object.unwrap()
        with trio.move_on_after(GOODBYE_S):
            await self._flush()
        await self._stream.send_eof()

    async def _flush(self) -> None:
        if not self._rest and not self._outgoing.pending:
            return
        async with self._flushing:
            while records := self._rest + self._outgoing.read():
                self._rest = b""
                await self._stream.send_all(records)

    async def _fill(self) -> None:
        data = await self._stream.receive_some(self._num_asked)
        self._num_asked = next_read(self._num_asked, len(data))
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


# ------------------------------------------------------------------------------ the files


def _load_certificate(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    key_name, key_path = ("http.tls_cert", cert) if key is None else ("http.tls_key", key)
    _check_pem("http.tls_cert", cert, b"CERTIFICATE")
    _check_pem(key_name, key_path, b"PRIVATE KEY")

    def refuse_password() -> NoReturn:
        raise ConfigError(
            f"{key_name} {key_path}: the private key is encrypted; give it without a passphrase,"
            " readable by this user alone"
        )

    try:
        context.load_cert_chain(cert, key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key_name} {key_path}: is not the key of the certificate in {cert}; the server's"
                " own certificate comes first in its file"
            ) from None
        raise ConfigError(
            f"http.tls_cert {cert}, key in {key_path}: cannot be used: {_reason(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"http.tls_cert {cert}: cannot be read: {error.strerror}") from None


def _check_pem(setting: str, path: str, kind: bytes) -> None:
    """Find the usual faults of a PEM file, which OpenSSL names badly.

    Raises:
        ConfigError: in one line, without anything of what the file holds.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{setting} {path}: is not a regular file")
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{setting} {path}: cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{setting} {path}: is not PEM; its lines begin with -----BEGIN")
    if kind + b"-----" not in content:
        raise ConfigError(f"{setting} {path}: holds no {kind.decode().lower()}")


def _reason(error: Any) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not valid"
    return str(reason).lower().replace("_", " ")
