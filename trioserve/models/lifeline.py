"""Run a module in a child that ends when its parent does: ``python -m … lifeline MODULE ARGS``.

The parent holds the other end of the child's stdin and writes nothing to it. A parent that is
killed can kill nobody, but the pipe closes. (PR_SET_PDEATHSIG is no way: it follows the thread that
started the child, and that is one of trio's, which come and go.)
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def die_with_parent(fd: int = 0) -> None:
    """From now on end this process, at once, when ``fd`` comes to its end."""

    def watch() -> None:
        while os.read(fd, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
