"""Listening sockets: had before anything heavy starts, refused with a reason a person can act on.

The socket made here is the one served from later, so nothing can take the address in between. It
is never shared (no SO_REUSEPORT) and never inherited by a child.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import trio

from trioserve.errors import BindError

if TYPE_CHECKING:
    from trioserve.config.schema import HttpConfig

log = logging.getLogger(__name__)

BACKLOG = 2048
MAX_UDS_PATH_BYTES = 107  # sun_path of Linux, less its final NUL
SPARE_DESCRIPTORS = 128  # files, pipes and libraries beside the connections
TCP_LISTEN = "0A"  # state column of /proc/net/tcp


class Listener:
    """One listening socket.

    Attributes:
        socket: the trio socket, listening.
    """

    def __init__(self, sock: socket.socket, uds_path: str | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.socket = trio.socket.from_stdlib_socket(sock)
        self._listener = trio.SocketListener(self.socket)
        self._uds_path = uds_path
        self._uds_inode = os.stat(uds_path).st_ino if uds_path is not None else None

    async def accept(self) -> trio.SocketStream:
        """Wait for the next connection. Cancellation loses none.

        Raises:
            OSError: out of descriptors or memory; the connection stays in the backlog.
            trio.ClosedResourceError: the listener was closed.
        """
        return await self._listener.accept()

    def close(self) -> None:
        """Stop listening and remove the socket's file, if it is still ours. Idempotent.

        Works outside of ``trio.run`` as well, for a start that fails early.
        """
        if trio.lowlevel.in_trio_run():
            self.socket.close()
        else:
            self._sock.close()
        path, self._uds_path = self._uds_path, None
        if path is not None:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == self._uds_inode:
                    os.unlink(path)


def bind(config: HttpConfig) -> list[Listener]:
    """Listen on what the configuration says: the unix socket, the descriptor, or host and port.

    A name that stands for several addresses gives one listener for each. Waits only for the name
    to be resolved. The limit of open files is raised as far as it may be.

    Raises:
        BindError: the address cannot be had; names it, its owner where that is known, the remedy.
    """
    _raise_open_files(config.max_connections)
    if config.fd is not None:
        return [_adopt(config.fd, config.send_timeout_s)]
    if config.uds is not None:
        return [_bind_unix(config.uds)]
    return _bind_tcp(config.host, config.port, config.send_timeout_s)


def describe(listener: Listener, scheme: str = "http") -> str:
    """The listener's address as a URL, with the port it really has."""
    family, name = listener.socket.family, listener.socket.getsockname()
    if family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(name)}" + (" (TLS)" if scheme == "https" else "")
    host = f"[{name[0]}]" if family == socket.AF_INET6 else name[0]
    return f"{scheme}://{host}:{name[1]}"


# ------------------------------------------------------------------------------------ TCP


def _bind_tcp(host: str, port: int, send_timeout_s: float) -> list[Listener]:
    if not 0 <= port <= 65535:
        raise BindError(f"http.port must lie between 0 and 65535, not {port}")
    listeners: list[Listener] = []
    refused: OSError | None = None
    try:
        for family, address in _resolve(host, port):
            if listeners and port == 0:
                # One port for all addresses of the name, the first one's.
                taken = listeners[0].socket.getsockname()[1]
                address = (address[0], taken, *address[2:])
            try:
                listeners.append(Listener(_listen_tcp(family, address, send_timeout_s)))
            except OSError as error:
                # A name may stand for addresses this machine does not have, mostly ::1.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _tcp_error(host, address[1], error) from error
                refused = error
        if not listeners:
            assert refused is not None
            raise _tcp_error(host, port, refused) from refused
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _resolve(host: str, port: int) -> list[tuple[int, tuple[str | int, ...]]]:
    if not host:
        raise BindError("http.host is empty; 0.0.0.0 or :: listens on all addresses")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise BindError(
            f"cannot resolve http.host {host!r}: {reason}; give an address or a name this machine"
            " knows"
        ) from error
    unique: dict[tuple[int, tuple[str | int, ...]], None] = {}
    for family, _, _, _, address in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            unique[int(family), cast("tuple[str | int, ...]", address)] = None
    return list(unique)


def _listen_tcp(
    family: int, address: tuple[str | int, ...], send_timeout_s: float
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Only lets a port be taken whose last connections still time out; two live listeners on
        # one port stay impossible on Linux.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        _set_tcp_options(sock, send_timeout_s)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_tcp_options(sock: socket.socket, send_timeout_s: float) -> None:
    """Options that accepted sockets inherit: find out about peers that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(send_timeout_s * 1000)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)


def _tcp_error(host: str, port: int | str, error: OSError) -> BindError:
    place = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        owner = _owner_of_port(int(port))
        return BindError(
            f"cannot listen on {place}: the port is taken{owner}; stop it, or choose another with"
            " --port"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return BindError(
            f"cannot listen on {place}: permission denied; ports below 1024 need privileges,"
            " choose another with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return BindError(
            f"cannot listen on {place}: not an address of this machine; 0.0.0.0 or :: listens on"
            " all it has"
        )
    return BindError(f"cannot listen on {place}: {error.strerror or error}; see http.host")


# ------------------------------------------------------------------------- unix, inherited


def _bind_unix(path: str) -> Listener:
    num_bytes = len(os.fsencode(path))
    if not 0 < num_bytes <= MAX_UDS_PATH_BYTES:
        raise BindError(
            f"http.uds {path!r} has {num_bytes} bytes; a socket's path has between 1 and"
            f" {MAX_UDS_PATH_BYTES}"
        )
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
        return Listener(sock, uds_path=path)
    except OSError as error:
        sock.close()
        raise BindError(
            f"cannot listen on unix socket {path}: {error.strerror}; its directory must exist and"
            " be writable"
        ) from error


def _remove_stale(path: str) -> None:
    """Remove the socket file of a dead server; refuse a live one and files of other kinds."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # nothing there, or a path that bind itself explains
    if not stat.S_ISSOCK(mode):
        raise BindError(f"http.uds {path} exists and is not a socket; move it or choose another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT):
                raise BindError(
                    f"cannot tell whether unix socket {path} is in use: {error.strerror}; remove"
                    " it or choose another"
                ) from error
            # A full backlog is a live server too.
    raise BindError(
        f"cannot listen on unix socket {path}: a server answers there{_owner_of_uds(path)}; stop"
        " it or choose another"
    )


def _adopt(fd: int, send_timeout_s: float) -> Listener:
    try:
        sock = socket.socket(fileno=fd)
    except (OSError, ValueError, OverflowError) as error:  # the latter beyond a C int
        cause = error.strerror if isinstance(error, OSError) else "no such descriptor"
        raise BindError(
            f"http.fd {fd} is not an open socket ({cause}); pass a listening descriptor"
        ) from error
    try:
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.type != socket.SOCK_STREAM or not listening:
            raise BindError(f"http.fd {fd} is a socket, but not a listening stream socket")
        sock.set_inheritable(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _set_tcp_options(sock, send_timeout_s)
        return Listener(sock)
    except BaseException:
        sock.detach()  # the descriptor stays the caller's
        raise


# --------------------------------------------------------------------------- who is there


def _owner_of_port(port: int) -> str:
    """`` by pid 123 (command)`` for the process that listens on ``port``, or nothing."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for columns in _table(table):
            local, state, inode = columns[1], columns[3], columns[9]
            if state == TCP_LISTEN and int(local.rpartition(":")[2], 16) == port:
                inodes.add(inode)
    return _owner_of(inodes)


def _owner_of_uds(path: str) -> str:
    return _owner_of({row[6] for row in _table("/proc/net/unix") if row[7:] == [path]})


def _table(path: str) -> Iterator[list[str]]:
    with contextlib.suppress(OSError), open(path) as file:
        next(file, None)
        for line in file:
            yield line.split()


def _owner_of(inodes: set[str]) -> str:
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in (name for name in os.listdir("/proc") if name.isdigit()) if links else ():
        with contextlib.suppress(OSError):  # other people's processes, and those that just ended
            directory = f"/proc/{pid}/fd"
            for fd in os.listdir(directory):
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(f"{directory}/{fd}") not in links:
                        continue
                    return f" by pid {pid} ({_command(pid)})"
    return ""


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read(4096).decode(errors="replace").rstrip("\0").split("\0")
    command = " ".join(words)
    return command if len(command) <= 120 else command[:117] + "..."


def _raise_open_files(max_connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        soft = possible
    if soft < needed:
        log.warning(
            "http.max_connections = %d does not fit in the limit of %d open files; raise it with"
            " `ulimit -n %d` or lower the setting",
            max_connections,
            soft,
            needed,
        )
