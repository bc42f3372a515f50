"""``hf:`` sources: the child against a small hub on this machine, and with no hub at all."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from trioserve.errors import ModelError
from trioserve.models import hub
from trioserve.models.hub_child import is_complete
from trioserve.models.source import fetch, parse_source

SHA = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(2_000_000),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same again",
    "onnx/config.json": b"{}",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """The four routes that a snapshot download asks for; ``seen`` is what was asked."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        if "/org/gated/" in self.path:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/org/tiny/" not in self.path:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/revision/nope" in self.path:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" in self.path:
            name = self.path.rpartition("/")[2]
            tag = name.encode().hex()[:40]
            self.answer(200, FILES[name], {"ETag": f'"{tag}"', "X-Repo-Commit": SHA})
        else:
            self.answer(200, self.listing(), {"Content-Type": "application/json"})

    def listing(self) -> bytes:
        if "/tree/" in self.path:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": name.encode().hex()[:40]}
                for name, body in FILES.items()
            ]
            return json.dumps(entries).encode()
        siblings = [{"rfilename": name} for name in FILES]
        return json.dumps({"id": "org/tiny", "sha": SHA, "siblings": siblings}).encode()

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.fixture
def seen(hub_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """A hub that runs; what it was asked."""
    handler = type("Handler", (Hub,), {"seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler.seen
        server.shutdown()
        thread.join()


async def get(source: str, token: str | None = None) -> tuple[Path, list]:
    reports: list = []
    path = await fetch(
        parse_source(source),
        cache_dir=None,
        hf_token=token,
        progress=lambda *report: reports.append(report),
    )
    assert isinstance(path, Path)
    return path, reports


async def test_a_snapshot_without_pickles_and_code(seen: list) -> None:
    path, reports = await get("hf:org/tiny", "hf_secret")
    names = set(list(FILES)[:4])
    assert {entry.name for entry in path.iterdir()} == names
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert {authorization for _, authorization in seen} == {"Bearer hf_secret"}
    assert reports[0] == (None, "asking for hf:org/tiny", None)
    fraction, detail, num_bytes = reports[-1]
    assert detail == "fetching hf:org/tiny"
    assert fraction is not None
    assert 0 < fraction <= 1
    assert num_bytes > 0


async def test_a_full_hash_needs_no_network_the_second_time(seen: list) -> None:
    first, _ = await get(f"hf:org/tiny@{SHA}")
    seen.clear()
    again, _ = await get(f"hf:org/tiny@{SHA}")
    assert (again, seen) == (first, [])


@pytest.mark.parametrize(
    ("source", "token", "words"),
    [
        ("hf:org/none", None, "hf:org/none: no such repository, or private: set model.hf_token"),
        ("hf:org/none", "t", "hf:org/none: no such repository, the token may not see it"),
        ("hf:org/gated", None, "the repository is gated: accept its terms"),
        ("hf:org/tiny@nope", None, "hf:org/tiny@nope: no such revision"),
    ],
)
@pytest.mark.usefixtures("seen")
async def test_refusals(source: str, token: str | None, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        await get(source, token)
    assert "\n" not in str(caught.value)


async def test_offline(seen: list, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = await get("hf:org/tiny")
    seen.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (await get("hf:org/tiny"))[0] == first
    with pytest.raises(ModelError, match=r"offline mode is on \(HF_HUB_OFFLINE\)"):
        await get("hf:org/none")
    assert seen == []


@pytest.mark.usefixtures("hub_environment")
async def test_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="hf:org/tiny: the hub cannot be reached"):
        await get("hf:org/tiny")


@pytest.mark.usefixtures("hub_environment")
async def test_cancellation_kills_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    children: list[trio.Process] = []
    kill = hub._kill

    async def record(process: trio.Process) -> None:
        children.append(process)
        await kill(process)

    monkeypatch.setattr(hub, "_kill", record)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(get, "hf:org/tiny")
        async with await listeners[0].accept():
            nursery.cancel_scope.cancel()
    await listeners[0].aclose()
    assert [process.returncode for process in children] == [-9]


@pytest.mark.usefixtures("hub_environment")
async def test_the_child_does_not_outlive_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that is killed closes the pipe to the child's stdin, and does nothing else."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    command = [sys.executable, "-P", "-m", "trioserve.models.hub_child"]
    run = partial(trio.run_process, command, stdin=subprocess.PIPE, check=False)
    request = json.dumps({"repository": "org/tiny", "revision": None, "token": None})
    async with trio.open_nursery() as nursery:
        process = await nursery.start(run)
        await process.stdin.send_all(request.encode() + b"\n")
        async with await listeners[0].accept():
            await process.stdin.aclose()
            with trio.fail_after(10):
                assert await process.wait() == 1
    await listeners[0].aclose()


async def test_a_child_that_dies_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="hf:o/n: the download ended with status 1"):
        await get("hf:o/n")


def test_an_interrupted_snapshot_is_not_complete(tmp_path: Path) -> None:
    assert not is_complete(str(tmp_path))
    (tmp_path / "a.safetensors").touch()
    assert is_complete(str(tmp_path))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not is_complete(str(tmp_path))
    (tmp_path / "b.safetensors").touch()
    assert is_complete(str(tmp_path))
