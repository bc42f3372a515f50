"""A program that embeds the server: serves MODEL.toml until a line on stdin says what to do:
"drain" ends it as a signal would, "cancel" cancels the scope it runs in.

Exits with 0 if the cancellation ended it, with 9 if that left a descriptor or a child.
"""

import contextlib
import os
import sys
from pathlib import Path

import trio

from trioserve.config import load
from trioserve.engine.supervisor import first_error, open_engine
from trioserve.errors import TrioserveError
from trioserve.http.listeners import bind, describe
from trioserve.http.server import serve_http
from trioserve.logs import set_up_logging


def held():
    """Descriptors and children of this process."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return descriptors, False
    return descriptors, True


async def main(config):
    listeners = bind(config.http)
    print("listening on", ", ".join(map(describe, listeners)), file=sys.stderr, flush=True)
    stopping = trio.Event()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, scope, stopping)
            async with open_engine(config, wait_ready=False, failure_grace_s=2.0) as engine:
                nursery.start_soon(say_what_happens, engine, stopping)
                await serve_http(
                    engine,
                    listeners,
                    config,
                    stopping=stopping,
                    drain_deadline_s=config.engine.drain_timeout_s,
                )
            nursery.cancel_scope.cancel()
    return scope.cancelled_caught


async def say_what_happens(engine, stopping):
    async for status in engine.watch():
        if status.phase == "ready":
            print("ready after", status.ready_after_s, file=sys.stderr, flush=True)
    stopping.set()


async def listen(scope, stopping):
    while True:
        await trio.lowlevel.wait_readable(0)
        line = os.read(0, 100)
        if line == b"drain\n":
            stopping.set()
            print("draining", file=sys.stderr, flush=True)
        else:
            scope.cancel()
            return


def run():
    loaded = load(Path(sys.argv[1]), env={}, overrides={})
    set_up_logging(loaded.config.log, None)
    before = held()
    try:
        cancelled = trio.run(main, loaded.config)
    except* TrioserveError as group:
        error = first_error(group)
        print(error, file=sys.stderr)
        code = error.exit_code
    else:
        code = 0 if cancelled else 8
    after = held()
    if after != before:
        print(f"left behind: {after} instead of {before}", file=sys.stderr)
        code = 9
    return code


if __name__ == "__main__":
    sys.exit(run())
