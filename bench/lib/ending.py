"""Children that end with the script that started them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def with_parent() -> Callable[[], None]:
    """For ``preexec_fn`` of a child: the kernel kills it when the calling thread has ended, so this
    is for children that the main thread starts. A server's own worker goes by its lifeline."""
    parent = os.getpid()

    def set_up() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it was quicker
            os._exit(1)

    return set_up
