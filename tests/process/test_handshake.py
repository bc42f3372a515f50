"""ST-08: whatever a worker does before Hello, the parent says so at once and keeps nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

import trioserve
from trioserve.errors import WorkerHandshakeError
from trioserve.ipc.fake import fake_endpoints
from trioserve.ipc.framing import encode
from trioserve.ipc.messages import PROTOCOL, Check, Checked, Fatal, Hello, Stage
from trioserve.ipc.process import Worker, attach, open_worker
from trioserve.ipc.spawn import spawn
from trioserve.ipc.status_page import process_state

pytestmark = pytest.mark.usefixtures("nothing_left")

Env = Callable[[str], dict[str, str]]


async def failure(env: dict[str, str], hello_timeout_s: float = 30.0, module: str = "child") -> str:
    with pytest.raises(WorkerHandshakeError) as caught:
        async with open_worker(module, env=env, hello_timeout_s=hello_timeout_s):
            pytest.fail("entered")
    assert caught.value.exit_code == 4
    return str(caught.value)


async def round_trip(worker: Worker, token: int = 1) -> None:
    await worker.send(Check(token))
    answer = await anext(worker.events)
    assert isinstance(answer, Checked)
    assert answer.token == token


async def test_a_good_worker_says_hello_answers_and_leaves(child_env: Env) -> None:
    async with open_worker("child", env=child_env("")) as worker:
        assert worker.hello == Hello(PROTOCOL, trioserve.__version__, worker.pid)
        assert not worker.exited
        assert worker.describe_exit() == "is still running"
        await round_trip(worker)
    assert worker.returncode == 0
    assert worker.describe_exit() == "exited with code 0"
    assert "exited with code 0" in repr(worker)


async def test_st_08_a_exit_before_hello_names_the_code_and_the_last_words(child_env: Env) -> None:
    text = await failure(child_env("exit 3"))
    assert text.startswith("the worker exited with code 3 before it said Hello")
    assert text.endswith("cannot import what is not there")


async def test_st_08_a_module_that_is_not_there(child_env: Env) -> None:
    text = await failure(child_env(""), module="no_such_module")
    assert "exited with code 1" in text
    assert "No module named no_such_module" in text


async def test_st_08_c_killed_before_hello_names_the_signal_and_hints_at_memory(
    child_env: Env,
) -> None:
    text = await failure(child_env("kill self"))
    assert re.search(
        r"was killed by signal 9 \(SIGKILL\) before it said Hello; often the kernel's "
        r"out-of-memory killer: needed 32 MiB, available [\d.]+ [GM]iB; ",
        text,
    )
    assert "nothing on its stderr" in text


async def test_st_08_d_no_hello_ends_at_the_deadline_and_leaves_nothing(child_env: Env) -> None:
    started = time.monotonic()
    text = await failure(child_env("silent"), hello_timeout_s=1.0)
    assert "did not say Hello within 1 s" in text
    assert "hello_timeout_s" in text
    assert time.monotonic() - started < 3


async def test_st_08_e_another_protocol_is_refused(child_env: Env) -> None:
    text = await failure(child_env("other protocol"))
    assert f"with protocol {PROTOCOL + 1}" in text
    assert "restart after an upgrade" in text


async def test_st_08_e_another_version_is_refused(child_env: Env) -> None:
    assert "the worker is trioserve 0.0.1" in await failure(child_env("other version"))


async def test_st_08_f_10_mb_on_stderr_before_hello_is_no_deadlock(child_env: Env) -> None:
    lines: list[str] = []
    env = child_env("10 MB lines")
    async with open_worker("child", env=env, hello_timeout_s=30, on_stderr=lines.append) as worker:
        await round_trip(worker)
    assert lines == ["y" * 127] * (160 * 512)
    assert worker.last_stderr() == ["y" * 127] * 50


async def test_st_08_f_a_line_of_10_mb_is_kept_in_bounds(child_env: Env) -> None:
    lines: list[str] = []
    env = child_env("10 MB line")
    async with open_worker("child", env=env, hello_timeout_s=30, on_stderr=lines.append) as worker:
        await round_trip(worker)
    assert (lines[0], lines[-1], len(lines)) == ("start", "end", 3)
    assert lines[1] == "x" * 8192 + f" … ({160 * 65536 - 8192} more bytes)"


async def test_what_is_printed_never_enters_the_protocol(child_env: Env) -> None:
    lines: list[str] = []
    async with open_worker("child", env=child_env("prints"), on_stderr=lines.append) as worker:
        await round_trip(worker)
    assert lines == ["printed", "written to 1", "from a program"]


async def test_half_a_frame_then_exit(child_env: Env) -> None:
    assert "exited with code 0 before it said Hello" in await failure(child_env("half a frame"))


async def test_an_oversized_frame(child_env: Env) -> None:
    assert "claims 4294967295 bytes" in await failure(child_env("oversized frame"))


async def test_a_frame_that_is_no_message(child_env: Env) -> None:
    assert "no message of the protocol" in await failure(child_env("no message"))


async def test_a_first_message_that_is_not_hello(child_env: Env) -> None:
    assert "its first message was Stage" in await failure(child_env("stage first"))


async def test_a_first_message_that_says_why(autojump_clock: trio.testing.MockClock) -> None:
    endpoints, fake = fake_endpoints()
    await fake.send(Fatal("python", "no numpy here", ""))
    with pytest.raises(WorkerHandshakeError, match="Fatal: no numpy here"):
        async with attach(endpoints):
            pytest.fail("entered")
    fake.status.close()


async def test_hello_as_the_process_ends_is_still_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    endpoints, fake = fake_endpoints()
    await fake.send(Hello(PROTOCOL, trioserve.__version__, 1))
    fake.process.exit(5)
    async with attach(endpoints) as worker:
        assert await worker.wait() == 5
    fake.status.close()


async def test_st_08_a_fork_that_holds_the_pipes_does_not_hide_the_exit(child_env: Env) -> None:
    started = time.monotonic()
    assert "exited with code 3" in await failure(child_env("fork holds pipes"))
    assert time.monotonic() - started < 5


async def test_st_08_a_stderr_held_open_from_another_session_is_not_waited_for(
    child_env: Env,
) -> None:
    started = time.monotonic()
    text = await failure(child_env("escaped child holds stderr"))
    assert time.monotonic() - started < 5
    escaped = int(text.split()[-1])
    assert process_state(escaped) == "S"
    os.kill(escaped, signal.SIGKILL)


async def test_a_python_that_is_not_there(child_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "/nonexistent/python" in await failure(child_env(""))


@pytest.mark.parametrize("num_calls", range(1, 8))
async def test_no_descriptor_left_when_spawning_fails_half_way(
    child_env: Env, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """Each call that can run out of descriptors does so, the last one after the process began."""
    calls = 0

    def limited(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == num_calls:
                raise OSError(24, "Too many open files")
            return real(*args)

        return call

    for name in ("pipe", "memfd_create", "pidfd_open"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))
    # Four pipes, the page, a pipe that Popen makes, the pidfd.
    assert "Too many open files" in await failure(child_env("silent"))
    assert calls == num_calls


async def test_the_worker_is_started_by_the_thread_that_runs_trio(
    child_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ties the worker to a thread that ends: a cached trio thread does after 10 s."""
    import threading

    threads = []
    real = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> object:
        threads.append(threading.get_ident())
        return real(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    async with open_worker("child", env=child_env("")):
        pass
    assert threads == [threading.get_ident()]


async def test_the_child_holds_no_descriptor_of_the_parent_and_gives_none_on(
    child_env: Env,
) -> None:
    read, write = os.pipe()  # as a listening socket would be: not inheritable
    async with open_worker("child", env=child_env("open files")) as worker:
        links = sorted(os.listdir(f"/proc/{worker.pid}/fd"), key=int)
        targets = [os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in links]
        assert os.readlink(f"/proc/self/fd/{write}") not in targets
        assert targets[0] == "/dev/null"
        assert targets[1] == targets[2]
        event = await anext(worker.events)
        assert isinstance(event, Stage)
        # ls has its own directory and the two pipes of capture_output beside stdin.
        assert event.detail.count("pipe:") == 2
    os.close(read)
    os.close(write)


async def test_encode_of_hello_is_stable_so_that_other_versions_can_be_named() -> None:
    assert encode(Hello(1, "0.1.0", 7))[4:] == b"\x94\xa5hello\x01\xa50.1.0\x07"


async def test_sd_07_a_child_is_deaf_to_ctrl_c_until_it_has_its_own_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between fork and setsid it is in the foreground group of the terminal."""
    masks: list[set[signal.Signals]] = []

    class Spy(subprocess.Popen[bytes]):
        def _execute_child(self, *args: Any, **kwargs: Any) -> None:
            masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
            raise OSError("far enough")

    monkeypatch.setattr(subprocess, "Popen", Spy)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(WorkerHandshakeError, match="far enough"):
        spawn("nothing")
    assert signal.SIGINT in masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
