"""TLS over real sockets: handshakes good and bad, half-closed and vanishing clients, reload."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from trioserve.config.schema import HttpConfig
from trioserve.http import reloading, tls
from trioserve.http.listeners import bind, describe

from .client import Client, Served, request_bytes, serving
from .fake_engine import FakeEngine, answer_hello

COMPLETION = {"prompt": "hi", "max_tokens": 100}
STREAM = COMPLETION | {"stream": True}


class Files:
    """A certificate authority and what it issued, as files."""

    def __init__(self, path: Path) -> None:
        self.ca = trustme.CA()
        self.cert, self.key = path / "cert.pem", path / "key.pem"
        self.ca_file = path / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.issue()

    def issue(self, ca: trustme.CA | None = None) -> None:
        leaf = (ca or self.ca).issue_cert("localhost", "127.0.0.1")
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self.key.write_bytes(leaf.private_key_pem.bytes())

    @property
    def settings(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}

    def client_context(self, ca: trustme.CA | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        (ca or self.ca).configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


class TlsClientStream:
    """What ``Client`` needs of a stream; ssl's own parts, so that it can misbehave."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext) -> None:
        self.transport, self.socket = stream, stream.socket
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    async def _retry(self, call: Any, *args: Any) -> Any:
        while True:
            try:
                result = call(*args)
            except ssl.SSLWantReadError:
                await self.flush()
                data = await self.transport.receive_some(65536)
                self.incoming.write(data) if data else self.incoming.write_eof()
            else:
                await self.flush()
                return result

    async def flush(self) -> None:
        if data := self.outgoing.read():
            await self.transport.send_all(data)

    async def handshake(self) -> None:
        await self._retry(self.object.do_handshake)

    async def send_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[await self._retry(self.object.write, view) :]

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        return bytes(await self._retry(self.object.read, max_bytes))

    async def send_eof(self) -> None:
        """close_notify, and then the end of the TCP stream."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.object.unwrap()
        await self.flush()
        await self.transport.send_eof()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.receive_some():
            yield data


async def connect(served: Served, context: ssl.SSLContext) -> tuple[Client, TlsClientStream]:
    transport = await trio.open_tcp_stream("127.0.0.1", served.port)
    stream = TlsClientStream(transport, context)
    client = Client(stream)  # type: ignore[arg-type]
    served.clients.append(client)
    await stream.handshake()
    return client, stream


async def still_serves(served: Served, files: Files) -> None:
    client, _ = await connect(served, files.client_context())
    await client.send("POST", "/v1/completions", COMPLETION)
    assert (await client.answer()).json["choices"][0]["text"] == "Hello world"


# -------------------------------------------------------------------------- it is HTTP


async def test_whole_and_streamed_answers_on_one_connection(files: Files) -> None:
    async with serving(**files.settings) as served:
        client, stream = await connect(served, files.client_context())
        assert stream.object.selected_alpn_protocol() is None
        for _ in range(3):
            await client.send("POST", "/v1/completions", COMPLETION)
            assert (await client.answer()).json["choices"][0]["text"] == "Hello world"
            await client.send("POST", "/v1/completions", STREAM)
            assert (await client.answer()).events[-1] == "[DONE]"
        await client.send("GET", "/health", Connection="close")
        assert (await client.answer()).status == 200
        assert await client.rest() == b""  # with close_notify: a cut would be an error


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions(version: ssl.TLSVersion, files: Files) -> None:
    context = files.client_context()
    context.minimum_version = context.maximum_version = version
    async with serving(**files.settings) as served:
        client, stream = await connect(served, context)
        assert stream.object.version() == version.name.replace("_", ".")
        await client.send("POST", "/v1/completions", STREAM)
        assert (await client.answer()).events[-1] == "[DONE]"


async def test_large_bodies_and_answers(files: Files) -> None:
    """Over the size of a record and of the socket's buffers, both ways."""
    engine = FakeEngine(max_model_len=3_000_000)
    async with serving(engine, **files.settings) as served:
        client, _ = await connect(served, files.client_context())
        prompt = "x" * 2_000_000
        await client.send("POST", "/v1/completions", {"prompt": prompt, "echo": True})
        assert (await client.answer()).json["choices"][0]["text"] == prompt + "Hello world"


async def test_httpx_and_openai(files: Files) -> None:
    import httpx
    import openai

    async with serving(**files.settings, api_keys=("sk-x",)) as served:
        url = f"https://localhost:{served.port}"
        context = files.client_context()
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"{url}/health")).json()["status"] == "ready"
            assert (await client.get(f"{url}/v1/models")).status_code == 401
        # The official client needs asyncio for its own; its synchronous one runs in a thread.

        def ask() -> list[str]:
            with openai.OpenAI(
                base_url=f"{url}/v1", api_key="sk-x", http_client=httpx.Client(verify=context)
            ) as client:
                whole = client.completions.create(model="fake", prompt="hi")
                pieces = client.completions.create(model="fake", prompt="hi", stream=True)
                return [whole.choices[0].text, "".join(p.choices[0].text for p in pieces)]

        assert await trio.to_thread.run_sync(ask) == ["Hello world"] * 2


async def test_http2_over_tls_when_switched_on(files: Files) -> None:
    import httpx

    async with serving(**files.settings, http2=True) as served:
        async with httpx.AsyncClient(verify=files.client_context(), http2=True) as client:
            url = f"https://localhost:{served.port}/v1/completions"
            for body in (COMPLETION, STREAM):
                answer = await client.post(url, json=body)
                assert (answer.http_version, answer.status_code) == ("HTTP/2", 200)
                assert "world" in answer.text
            # A page's own origin is known by what stands for the Host header there.
            for origin, status in [
                ("https://localhost", 403),
                (f"https://localhost:{served.port}", 200),
            ]:
                answer = await client.post(url, json=COMPLETION, headers={"Origin": origin})
                assert answer.status_code == status


async def test_unix_socket(files: Files, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("uds") / "s")
    async with serving(**files.settings, uds=path):
        stream = TlsClientStream(
            await trio.open_unix_socket(path),  # type: ignore[arg-type]
            files.client_context(),
        )
        await stream.handshake()
        client = Client(stream)  # type: ignore[arg-type]
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200
        await stream.transport.aclose()


def test_addresses_say_it(tmp_path: Path) -> None:
    for http in (HttpConfig(port=0), HttpConfig(uds=str(tmp_path / "s"))):
        [listener] = bind(http)
        try:
            plain, secured = describe(listener), describe(listener, "https")
            assert secured == plain.replace("http:", "https:") + " (TLS)" * (http.uds is not None)
        finally:
            listener.close()


# ---------------------------------------------------------------------- bad handshakes


async def test_plain_http_gets_an_answer_and_an_end(files: Files) -> None:
    async with serving(**files.settings) as served:
        for raw in (request_bytes("GET", "/"), request_bytes("POST", "/", b"x" * 100_000)):
            client = await served.connect()
            await client.stream.send_all(raw)
            answer = await client.answer()
            assert (answer.status, answer.json["error"]["code"]) == (400, "plain_http")
            assert await client.rest() == b""
        await still_serves(served, files)


@pytest.mark.parametrize(
    "raw", [b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"x" * 70000, b"SSH-2.0\r\n"]
)
async def test_garbage_is_cut(raw: bytes, files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(**files.settings) as served:
        client = await served.connect()
        with contextlib.suppress(trio.BrokenResourceError):
            await client.stream.send_all(raw)
            await client.rest()  # an alert, or nothing
        await still_serves(served, files)
    assert "a connection failed" not in caplog.text
    told = [r.getMessage() for r in caplog.records if "handshake" in r.getMessage()]
    assert len(told) == 1
    assert "of 127.0.0.1: " in told[0]


async def test_old_versions_are_refused(files: Files) -> None:
    context = files.client_context()
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with serving(**files.settings) as served:
        with pytest.raises((ssl.SSLError, trio.BrokenResourceError)):
            await connect(served, context)
        await still_serves(served, files)


async def test_a_client_that_leaves_within_the_handshake(files: Files) -> None:
    async with serving(**files.settings) as served:
        for part in (b"", b"\x16\x03\x01"):
            client = await served.connect()
            await client.stream.send_all(part)
            await client.stream.send_eof()
            await client.rest()
            client = await served.connect()
            await client.stream.send_all(part)
            client.reset()
        await still_serves(served, files)


async def test_a_silent_client_is_cut_and_holds_up_nobody(files: Files) -> None:
    async with serving(**files.settings, tls_handshake_timeout_s=0.3) as served:
        silent = [await served.connect() for _ in range(10)]
        await still_serves(served, files)
        for client in silent:
            assert await client.rest() == b""


async def test_silent_clients_make_room(files: Files) -> None:
    async with serving(**files.settings, tls_handshake_timeout_s=1000, max_connections=3) as served:
        silent = [await served.connect() for _ in range(3)]
        await still_serves(served, files)
        assert await silent[0].rest() == b""


# ------------------------------------------------------------------------ ends of streams


async def test_half_closed_stream_goes_on(files: Files) -> None:
    """A client that says in TLS that it will send no more reads its stream to the end."""
    engine = FakeEngine(script=None)
    async with serving(engine, **files.settings) as served:
        client, stream = await connect(served, files.client_context())
        await client.send("POST", "/v1/completions", STREAM)
        await stream.send_eof()
        [request] = await engine.submitted()
        await trio.sleep(0.05)
        assert not request.closed.is_set()
        answer_hello(request)
        raw = b""
        while piece := await stream.transport.receive_some():
            raw += piece
        stream.incoming.write(raw)
        text = b""
        with pytest.raises(ssl.SSLZeroReturnError):  # an end that was said, not a cut
            while True:
                text += stream.object.read(65536)
        assert b"world" in text
        assert b"[DONE]" in text


@pytest.mark.parametrize("body", [COMPLETION, STREAM])
@pytest.mark.parametrize("how", ["notify", "cut", "reset"])
async def test_a_client_that_leaves_ends_its_work(
    how: str, body: dict[str, Any], files: Files
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, **files.settings) as served:
        client, stream = await connect(served, files.client_context())
        await client.send("POST", "/v1/completions", body)
        [request] = await engine.submitted()
        if how == "notify":
            with contextlib.suppress(ssl.SSLWantReadError):
                stream.object.unwrap()
            await stream.flush()
            await stream.transport.aclose()
        elif how == "cut":
            await stream.transport.aclose()
        else:
            client.reset()
        with trio.fail_after(3):
            await request.closed.wait()
        assert request.aborted
        engine.script = answer_hello
        await still_serves(served, files)


async def test_a_cut_without_goodbye_is_no_half_close(files: Files) -> None:
    """What the client sent may have been cut by somebody else; nobody may decide that but it."""
    engine = FakeEngine(script=None)
    async with serving(engine, **files.settings) as served:
        client, stream = await connect(served, files.client_context())
        await client.send("POST", "/v1/completions", STREAM)
        [request] = await engine.submitted()
        await stream.transport.send_eof()
        with trio.fail_after(3):
            await request.closed.wait()


async def test_a_client_that_reads_nothing_is_cut(files: Files) -> None:
    from trioserve.engine.api import TextDelta

    engine = FakeEngine(script=None)
    async with serving(engine, **files.settings, send_timeout_s=0.3) as served:
        client, _ = await connect(served, files.client_context())
        await client.send("POST", "/v1/completions", STREAM)
        [request] = await engine.submitted()
        with trio.fail_after(10):
            while not request.closed.is_set():
                request.push(TextDelta("x" * 100_000, [7]))
                await trio.sleep(0.01)
        engine.script = answer_hello
        await still_serves(served, files)


async def test_records_stay_in_order_when_the_kernel_takes_a_part(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The send that never waits may be given a part of what it encrypted."""
    real = tls.os.write
    monkeypatch.setattr(tls.os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    async with serving(**files.settings) as served:
        for _ in range(5):
            await still_serves(served, files)
            client, _stream = await connect(served, files.client_context())
            await client.send("POST", "/v1/completions", STREAM)
            assert (await client.answer()).events[-1] == "[DONE]"


async def test_tls_that_breaks_under_an_answer_ends_its_connection_alone(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, **files.settings) as served:
        client, _ = await connect(served, files.client_context())
        await client.send("POST", "/v1/completions", STREAM)
        [request] = await engine.submitted()
        with monkeypatch.context() as broken:

            def refuse(*_: object) -> None:
                raise ssl.SSLError("broken")

            broken.setattr(ssl.SSLObject, "write", refuse)
            answer_hello(request)
            with pytest.raises((EOFError, ssl.SSLError, trio.BrokenResourceError)):
                await client.answer()
        engine.script = answer_hello
        await still_serves(served, files)
    assert caplog.records == []


async def test_drain(files: Files) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, **files.settings) as served:
        idle, _ = await connect(served, files.client_context())
        await idle.send("GET", "/health")
        await idle.answer()
        silent = await served.connect()
        client, _ = await connect(served, files.client_context())
        await client.send("POST", "/v1/completions", STREAM)
        [request] = await engine.submitted()
        served.stopping.set()
        answer_hello(request)
        assert (await client.answer()).events[-1] == "[DONE]"
        assert await client.rest() == b""
        assert await idle.rest() == b""
        assert await silent.rest() == b""
        with trio.fail_after(1):
            await served.done.wait()


# ------------------------------------------------------------------- certificates of clients


async def test_clients_need_a_certificate_when_asked(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(**files.settings, tls_client_ca=str(files.ca_file)) as served:

        async def ask(*issuers: trustme.CA) -> int:
            context = files.client_context()
            for issuer in issuers:
                issuer.issue_cert("client@example.org").configure_cert(context)
            client, _ = await connect(served, context)
            await client.send("GET", "/health")
            return (await client.answer()).status

        assert await ask(files.ca) == 200
        for issuers in ([], [trustme.CA()]):
            with pytest.raises((ssl.SSLError, trio.BrokenResourceError, EOFError)):
                await ask(*issuers)
        assert await ask(files.ca) == 200
    told = [r.getMessage() for r in caplog.records if "handshake" in r.getMessage()]
    assert "did not return a certificate" in told[0]


# ---------------------------------------------------------------------------------- reload


async def test_new_connections_use_new_files(
    files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(reloading, "LOOK_EVERY_S", 0.0)
    other = trustme.CA()
    async with serving(**files.settings) as served:
        old, _ = await connect(served, files.client_context())
        files.issue(other)
        with pytest.raises(ssl.SSLError):
            await connect(served, files.client_context())
        client, _ = await connect(served, files.client_context(other))
        for each in (old, client):  # and the old connection goes on
            await each.send("GET", "/health")
            assert (await each.answer()).status == 200

        good = files.key.read_bytes()
        for broken in (b"", b"-----BEGIN PRIVATE KEY-----\nxx\n", other.cert_pem.bytes()):
            files.key.write_bytes(broken)
            await connect(served, files.client_context(other))
        files.key.unlink()
        await connect(served, files.client_context(other))
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert len(errors) == 4
        assert all("stay in use" in error and str(files.key) in error for error in errors)

        files.key.write_bytes(good)
        files.issue()
        await connect(served, files.client_context())
