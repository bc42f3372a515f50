"""The worker's end by itself: what it imports, its inbox, its sender, started by hand."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import trio

from trioserve.ipc.child import EventSender, Inbox
from trioserve.ipc.framing import FrameDecoder, MalformedFrame, encode
from trioserve.ipc.messages import Abort, Check, Exit, Hello, Stage
from trioserve.ipc.process import open_worker

pytestmark = pytest.mark.usefixtures("nothing_left")

Env = Callable[[str], dict[str, str]]
HEAVY = {
    "trio",
    "torch",
    "numpy",
    "numba",
    "transformers",
    "asyncio",
    "tokenizers",
    "multiprocessing",
}


async def test_the_child_imports_nothing_heavy(child_env: Env) -> None:
    async with open_worker("child", env=child_env("modules")) as worker:
        event = await anext(worker.events)
        assert isinstance(event, Stage)
        modules = {name.partition(".")[0] for name in event.detail.split()}
        assert "msgspec" in modules
        assert modules & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    ["process", "spawn", "streams", "stderr", "status_page", "framing", "child", "messages"],
)
def test_the_parent_side_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, trioserve.ipc.{module}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in ran.stdout.split()}
    assert modules & (HEAVY - {"trio"}) == set()
    assert ("trio" in modules) == (module in {"process", "spawn", "streams", "stderr"})


@pytest.mark.parametrize(
    "argv", [[], ["--fds"], ["--fds", "a,b,c,d"], ["--fds", "0,1"], ["--fds", "90,91,92,93"]]
)
def test_started_by_hand_it_says_what_it_is(argv: list[str]) -> None:
    code = "import sys; from trioserve.ipc.child import Channel; Channel.open(sys.argv[1:])"
    ran = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "this is the worker process; `trioserve run` starts it\n"


def test_inbox_hands_out_in_order_and_the_end_for_ever() -> None:
    inbox = Inbox()
    assert inbox.drain() == []
    assert inbox.get(timeout_s=0) is None
    inbox.put(Check(1))
    inbox.put(Abort([2]))
    assert inbox.get() == Check(1)
    inbox.put(Check(3))
    inbox.put(Exit())
    assert inbox.drain() == [Abort([2]), Check(3), Exit()]
    for _ in range(2):
        assert inbox.get() == Exit()
        assert inbox.get(timeout_s=0) == Exit()
        assert inbox.drain() == [Exit()]


def test_inbox_raises_a_fault_after_what_came_before_it_and_for_ever() -> None:
    inbox = Inbox()
    inbox.put(Check(1))
    inbox.put(MalformedFrame("garbage"))
    assert inbox.drain() == [Check(1)]
    for call in (inbox.drain, inbox.get, inbox.drain):
        with pytest.raises(MalformedFrame, match="garbage"):
            call()
    other = Inbox()
    other.put(MalformedFrame("garbage"))
    for call in (other.get, other.drain, other.get):
        with pytest.raises(MalformedFrame, match="garbage"):
            call()


async def test_commands_arrive_while_the_worker_is_busy(child_env: Env) -> None:
    """More than a pipe holds, to a worker whose main thread takes none of it."""
    async with open_worker("child", env=child_env("deaf"), grace_s=0.01) as worker:
        with trio.fail_after(20):
            for token in range(300):
                await worker.send(Abort(list(range(token, token + 1000))))


async def test_a_bad_command_is_named_on_the_stderr_of_the_worker(child_env: Env) -> None:
    async with open_worker("child", env=child_env("")) as worker:
        await worker.send(Hello(1, "", 0))  # type: ignore[arg-type]
        with trio.fail_after(10):
            assert await worker.wait() == 1
        assert "MalformedFrame" in worker.last_stderr()[-1]


def test_sender_leaves_quietly_when_nobody_reads() -> None:
    read, write = os.pipe()
    sender = EventSender(write)
    sender.send(Stage("python", "start"))
    assert FrameDecoder().feed(os.read(read, 1000)) == [encode(Stage("python", "start"))[4:]]
    os.close(read)
    with pytest.raises(SystemExit) as caught:
        sender.send(Stage("python", "end"))
    assert caught.value.code == 0
    os.close(write)


def test_sender_refuses_another_thread() -> None:
    read, write = os.pipe()
    sender = EventSender(write)
    results: queue.SimpleQueue[str] = queue.SimpleQueue()

    def send() -> None:
        try:
            sender.send(Stage("python", "start"))
        except AssertionError as fault:
            results.put(str(fault))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    assert results.get(timeout=0) == "two threads would mix their frames"
    os.close(read)
    os.close(write)
