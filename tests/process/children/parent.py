"""A parent to be killed: starts the test worker, says on stdout what is there, then obeys stdin.

Lines out: the worker's pid and, where it has one, its grandchild's. Lines in: "check" makes a
round trip and answers "answered", anything else leaves.
"""

import os
import signal
import sys

import trio

from trioserve.ipc.messages import Check, Checked, Stage
from trioserve.ipc.process import open_worker

MODE = sys.argv[1] if len(sys.argv) > 1 else ""


async def main():
    if MODE == "ignores SIGINT":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    async with open_worker("child", hello_timeout_s=30) as worker:
        grandchild = ""
        if os.environ.get("FAULT"):
            first = await anext(worker.events)
            assert isinstance(first, Stage)
            grandchild = first.detail
        if MODE == "forks" and os.fork() == 0:
            signal.pause()
        print(worker.pid, grandchild, flush=True)
        while (await trio.to_thread.run_sync(sys.stdin.readline)).strip() == "check":
            await worker.send(Check(1))
            async for event in worker.events:
                if isinstance(event, Checked):
                    print("answered", flush=True)
                    break


trio.run(main)
