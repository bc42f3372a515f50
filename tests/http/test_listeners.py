"""Binding: every way it can go wrong names the address and the remedy."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.config.schema import HttpConfig
from trioserve.errors import BindError
from trioserve.http.listeners import bind, describe


def closing(listeners: list[Any]) -> None:
    for listener in listeners:
        listener.close()


async def test_free_port_and_description() -> None:
    [listener] = bind(HttpConfig(port=0))
    port = listener.socket.getsockname()[1]
    assert describe(listener) == f"http://127.0.0.1:{port}"
    assert not os.get_inheritable(listener.socket.fileno())
    assert listener.socket.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
    assert listener.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30000
    async with await trio.open_tcp_stream("127.0.0.1", port), await listener.accept() as accepted:
        timeout = accepted.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert timeout == 30000
        assert not os.get_inheritable(accepted.socket.fileno())
    listener.close()
    listener.close()


async def test_st_01_port_taken_names_the_owner() -> None:
    [first] = bind(HttpConfig(port=0))
    port = first.socket.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        with pytest.raises(BindError) as caught:
            bind(HttpConfig(host=host, port=port))
        message = str(caught.value)
        assert f"{host}:{port}" in message
        assert f"pid {os.getpid()} (" in message
        assert "--port" in message
    first.close()
    closing(bind(HttpConfig(port=port)))


def test_st_01_owner_in_another_process(tmp_path: Path) -> None:
    code = (
        "import socket,sys; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen();"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        with pytest.raises(BindError, match=rf"pid {owner.pid} \(.*socket"):
            bind(HttpConfig(port=port))
        owner.communicate()


def test_st_01_port_of_connections_that_time_out_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # this side times out
        client.close()
    closing(bind(HttpConfig(port=port)))


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_ipv6() -> None:
    if not has_ipv6():
        with pytest.raises(BindError):
            bind(HttpConfig(host="::1", port=0))
        return
    [listener] = bind(HttpConfig(host="::1", port=0))
    assert describe(listener).startswith("http://[::1]:")
    listener.close()
    [both] = bind(HttpConfig(host="::", port=0))
    port = both.socket.getsockname()[1]
    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
    await (await trio.open_tcp_stream("::1", port)).aclose()
    both.close()


def test_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    listeners = bind(HttpConfig(host="several", port=0))
    names = [listener.socket.getsockname() for listener in listeners]
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert names[0][1] == names[1][1] > 0
    closing(listeners)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found[2:3])
    with pytest.raises(BindError, match="not an address of this machine"):
        bind(HttpConfig(host="several", port=0))


def test_host_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(BindError, match=r"cannot resolve http\.host 'nowhere'.*not known"):
        bind(HttpConfig(host="nowhere"))


@pytest.mark.parametrize("host", ["", "a" * 70, "256.1.1.1.1."])
def test_odd_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BindError, match=r"http\.host"):
        bind(HttpConfig(host=host, port=0))


def test_permission_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbidden)
    with pytest.raises(BindError, match=r"127.0.0.1:80: permission denied.*1024"):
        bind(HttpConfig(port=80))


async def test_unix_socket_comes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    [listener] = bind(HttpConfig(uds=str(path)))
    assert describe(listener) == f"unix:{path}"
    async with await trio.open_unix_socket(str(path)), await listener.accept():
        pass
    with pytest.raises(BindError, match=rf"a server answers there by pid {os.getpid()}"):
        bind(HttpConfig(uds=str(path)))
    listener.close()
    assert not path.exists()


async def test_unix_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    [listener] = bind(HttpConfig(uds=str(path)))
    path.unlink()
    [newer] = bind(HttpConfig(uds=str(path)))
    listener.close()
    assert path.exists()  # it is the newer one's
    newer.close()


def test_unix_socket_faults(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.write_text("precious")
    with pytest.raises(BindError, match="not a socket"):
        bind(HttpConfig(uds=str(plain)))
    assert plain.read_text() == "precious"
    with pytest.raises(BindError, match="107"):
        bind(HttpConfig(uds=str(tmp_path / ("x" * 108))))
    with pytest.raises(BindError, match="directory must exist"):
        bind(HttpConfig(uds=str(tmp_path / "none" / "s")))
    with pytest.raises(BindError, match="0 bytes"):
        bind(HttpConfig(uds=""))


async def test_inherited_descriptor(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        [listener] = bind(HttpConfig(fd=os.dup(given.fileno())))
        assert describe(listener) == f"http://127.0.0.1:{given.getsockname()[1]}"
        assert not os.get_inheritable(listener.socket.fileno())
        listener.close()
    with socket.socket() as unbound, pytest.raises(BindError, match="not a listening"):
        bind(HttpConfig(fd=unbound.fileno()))
    with (tmp_path / "f").open("w") as file, pytest.raises(BindError, match="not an open socket"):
        bind(HttpConfig(fd=file.fileno()))
    with pytest.raises(BindError, match="fd 999"):
        bind(HttpConfig(fd=999))
    with socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        with pytest.raises(BindError):
            bind(HttpConfig(fd=udp.fileno()))
        assert udp.getsockname()  # still the caller's


def test_open_files_are_raised_or_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 2048)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    closing(bind(HttpConfig(port=0, max_connections=1500)))
    assert limits[-1] == (1628, 2048)
    assert not caplog.records
    closing(bind(HttpConfig(port=0, max_connections=4000)))
    assert limits[-1] == (2048, 2048)
    assert "ulimit -n 4128" in caplog.text


def test_binding_imports_nothing_heavy() -> None:
    code = (
        "import sys, trioserve.http.listeners\n"
        "print([m for m in ('quart', 'hypercorn', 'torch', 'numpy', 'orjson', 'werkzeug')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_whole_http_layer_imports_no_model_library() -> None:
    code = (
        "import sys, trioserve.http.server\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'tokenizers', 'numba')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("fd", [99, 2**31, 2**40 - 1, 2**63 - 1])
def test_a_descriptor_that_cannot_be_is_one_line(fd: int) -> None:
    with pytest.raises(BindError, match="not an open socket"):
        bind(HttpConfig(fd=fd))
