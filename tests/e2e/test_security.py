"""Keys, certificates and control routes of a real server."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from .server import Server, running, start

KEY, FILE_KEY = "sk-env-0123456789", "sk-file-abcdef"
SIMULATED: dict[str, dict[str, Any]] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
    "device": {"kind": "simulated", "simulated_step_s": 0.02},
}


@pytest.fixture
def ca(tmp_path: Path) -> trustme.CA:
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    return ca


def client_of(server: Server, ca: trustme.CA, key: str = KEY) -> httpx.Client:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return httpx.Client(base_url=server.url, verify=context, headers={"x-api-key": key}, timeout=30)


def test_op_02_keys_tls_and_control_together(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(FILE_KEY)
    keys.chmod(0o600)
    server = start(
        tmp_path,
        env={"TRIOSERVE_HTTP__API_KEYS": KEY},
        http={
            "api_keys_file": str(keys),
            "tls_cert": str(tmp_path / "server.pem"),
            "admin": True,
        },
        log={"requests": True},
        **SIMULATED,
    )
    try:
        server.url = server.url.replace("http:", "https:")
        with client_of(server, ca) as client:

            def ready() -> bool:
                try:
                    return client.get("/health/ready").status_code == 200
                except httpx.TransportError:
                    return False

            server.wait_until(ready, "ready")
            assert f" on https://127.0.0.1:{server.port}" in server.log
            assert client.get("/startup").status_code == 200
            for key, status in [("wrong", 401), (FILE_KEY, 200)]:
                answer = client.get("/startup", headers={"x-api-key": key})
                assert answer.status_code == status

            # No child has a secret it has no use for.
            for child in [server.worker(), *server.tree()]:
                assert KEY not in str(child.environ())

            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            top = [sys.executable, "-P", "-m", "trioserve", "top", "--once", server.url]
            looked = subprocess.run(top, capture_output=True, text=True, timeout=30)
            assert (looked.returncode, looked.stdout) == (1, "")
            assert "the server wants an API key" in looked.stderr
            env = os.environ | {"TRIOSERVE_API_KEY": KEY}
            looked = subprocess.run(top, capture_output=True, text=True, timeout=30, env=env)
            assert looked.returncode == 0, looked.stderr

            body = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                id = stream.headers["x-request-id"]
                found = client.get(f"/v1/requests/{id}").json()
                assert found["status"] in ("queued", "running")
                answer = client.post("/admin/drain")
                assert answer.json() == {"status": "draining", "open_requests": 1}
                assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.wait() == 0, server.log
        server.assert_nothing_left()
        assert "POST /v1/completions: 200" in server.log
        assert KEY not in server.log
        assert FILE_KEY not in server.log
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def test_control_without_a_key_is_for_this_machine_alone(tmp_path: Path) -> None:
    server = start(tmp_path, http={"admin": True, "host": "0.0.0.0"}, **SIMULATED)
    assert server.wait() == 2
    assert "http.admin = true on 0.0.0.0 needs http.api_keys" in server.last_line
    assert "spawn" not in server.log
    with running(tmp_path, http={"admin": True}, **SIMULATED) as server:
        assert server.post("/admin/pause").json() == {"paused": True}
        assert server.post("/admin/resume").json() == {"paused": False}
        assert server.post("/admin/reset_prefix_cache").json() == {"success": True}


def test_an_open_server_on_the_network_is_told_of_once(tmp_path: Path) -> None:
    with running(tmp_path, http={"host": "0.0.0.0"}, **SIMULATED) as server:
        assert server.log.count("without an API key: anybody who reaches the port") == 1
    with running(tmp_path, **SIMULATED) as server:
        assert "API key" not in server.log


def test_control_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start(tmp_path, http={"admin": True, "uds": str(path)}, **SIMULATED)
    try:
        server.wait_until(path.exists, "listening")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x", timeout=10) as client:
            assert client.post("/admin/drain").status_code == 200
        assert server.wait() == 0, server.log
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
