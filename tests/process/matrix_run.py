"""Runs one case of the kill matrix on real processes and says everything that is wrong with it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from trioserve.ipc.status_page import process_state

from .matrix_cases import (
    HELD_STATES,
    PARENT_STATES,
    STAGE_STATES,
    Case,
    cause,
    exit_codes,
    survives,
)
from .matrix_parts import (
    Answer,
    Wrong,
    command_line,
    never_answer,
    to_toml,
    unchunk,
    written,
)

CHILDREN = Path(__file__).parent / "children"
RANDOM_MODEL = "random:llama?num_layers=1&hidden_size=32"
MARK, OTHER = 7, 9  # first token of requests that a fault hits, and of those it must not touch
GONE_S = 2.0  # the tree of a killed parent
AT_ONCE_S = 2.0  # a cancellation, a second signal
LADDER_S = 7.0  # until a worker that is deaf is put down: grace, stacks, kill
REACH_S = 30.0  # to come to the state; not what is measured here
DRAIN_S = 1.0  # where a drain is to be cut
LISTENS_S = 1.0  # from the start of a server to its sockets, where it has a processor to itself
MAX_SLACK = 10.0
TICK_S = 0.02


class Run:
    """One server and its clients. Its own tasks alone write here."""

    def __init__(self, case: Case, directory: Path, model: str) -> None:
        self.case = case
        self.directory = directory
        self.model = model
        self.problems: list[str] = []
        self._raw_log = bytearray()
        self.answers: list[Answer] = []
        self.outcome_s = math.nan
        self.slack = 1.0  # deadlines times this: how much slower than usual the machine is now
        self.event_s = math.nan  # when the event was that is to be answered
        self.deadline_s = REACH_S
        self._grown = trio.Event()
        self._log_ended = trio.Event()
        self._first_delta = trio.Event()
        self._process: trio.Process
        self._clients: trio.Nursery
        self._hub_port = 0

    # -------------------------------------------------------------------------- the server

    @asynccontextmanager
    async def started(self) -> Any:
        async with trio.open_nursery() as nursery:
            if self.case.state == "fetch held":
                listeners = await nursery.start(trio.serve_tcp, never_answer, 0)
                self._hub_port = listeners[0].socket.getsockname()[1]
            path = self.directory / "model.toml"
            path.write_text(to_toml(self._config()))
            module = ["-m", "embed"] if self.case.parent == "cancel" else ["-m", "trioserve", "run"]
            self._process = await trio.lowlevel.open_process(
                [sys.executable, *module, str(path)],
                env=self._environment(),
                stdin=-1,
                stdout=-3,
                stderr=-1,
                start_new_session=True,
            )
            began_s = trio.current_time()
            nursery.start_soon(self._read_log)
            try:
                await self.says("listening on")
                listens_s = trio.current_time() - began_s
                self.slack = min(max(1.0, listens_s / LISTENS_S), MAX_SLACK)
                async with trio.open_nursery() as self._clients:
                    yield
                    self._clients.cancel_scope.cancel()
            finally:
                self.kill_all()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    await self._process.wait()
                    await self._log_ended.wait()
                assert self._process.stdin is not None
                await self._process.stdin.aclose()
            nursery.cancel_scope.cancel()

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TRIOSERVE_"))
        }
        return inherited | {
            "KILL_MATRIX": self.marker,
            "PYTHONPATH": str(CHILDREN),
            "OMP_NUM_THREADS": "1",
            "HF_ENDPOINT": f"http://127.0.0.1:{self._hub_port}",
            "HF_HOME": str(self.directory / "hf"),
        }

    @property
    def marker(self) -> str:
        """In the environment of all processes of the tree, and of no other."""
        return str(self.directory)

    @property
    def socket_path(self) -> Path:
        return self.directory / "s"

    def _config(self) -> dict[str, dict[str, Any]]:
        case = self.case
        real = case.device == "real"
        waits_for_watchdog = case.effect == "hangs" and case.parent == "none"
        source = self.model if real else RANDOM_MODEL
        if case.state == "fetch held":
            source = "hf:somebody/something"
        elif case.state == "inspect held":
            held = self.directory / "held"
            held.mkdir()
            os.mkfifo(held / "config.json")
            source = str(held)
        http: dict[str, Any] = {"port": 0}
        if case.listener == "uds":
            http = {"uds": str(self.socket_path)}
        cut = case.effect == "hangs" and case.parent in ("SIGTERM", "SIGINT")
        return {
            "model": {"source": source},
            "http": http,
            "log": {"format": "text" if case.listener == "tcp" else "json"},
            "device": {"kind": "auto"} if real else {"kind": "simulated", "simulated_step_s": 0.03},
            "kernels": {"attention": "torch"},
            "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
            "cache": {"memory": "1MiB"} if case.fault != "device-memory" else {},
            "engine": {
                "on_death": case.policy,
                "max_restarts": 3,
                "restart_backoff_s": 3.0 if case.fault == "none" else 0.1,
                "hello_timeout_s": 3.0 if waits_for_watchdog else 60.0,
                "startup_silence_s": (15.0 if real else 3.0) if waits_for_watchdog else 60.0,
                "drain_timeout_s": DRAIN_S if cut and case.state != "draining" else 20.0,
            },
            "watchdog": {
                "interval_s": 0.2,
                "step_budget_s": 1.0 if waits_for_watchdog else 60.0,
            },
            "test": self._faults(),
        }

    def _faults(self) -> dict[str, Any]:
        case = self.case
        if case.state in PARENT_STATES:
            kind = {
                "none": "raise",
                "kill": "kill",
                "SIGTERM": "signal:15",
                "SIGINT": "signal:2",
                "second SIGINT": "signal:2",
            }.get(case.parent)
            faults = [f"{case.state}:{kind}"] if kind else []
        elif case.fault in ("none", "stop") or case.state == "idle":
            faults = []
        else:
            faults = [f"{self._place()}:{written(case.fault)}"]
        if not faults:
            return {}
        return {"allow_faults": True, "faults": faults, "mark_token_id": MARK}

    def _place(self) -> str:
        """Of the fault; where a new worker is to work, it is the first's alone."""
        case = self.case
        bad_logits = case.fault in ("nan", "inf")
        match case.state:
            case "prefilling":
                return "sample@1" if bad_logits else "prefill#1"
            case "decoding":
                return "sample@6" if bad_logits else "decode@5#1"
            case "draining":
                return "sample@40" if bad_logits else "decode@40"
            case "restarting":
                return "hello#2" if case.fault == "protocol" else "weights#2"
        return case.state

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        try:
            async for data in self._process.stderr:
                self._raw_log += data
                if len(self._raw_log) > 64 * 1024 * 1024:
                    raise Wrong("the log has no end")
                self._grown.set()
                self._grown = trio.Event()
        finally:
            self._log_ended.set()
            self._grown.set()

    # ------------------------------------------------------------------------------ the play

    async def play(self) -> None:
        """Come to the state, and do to the parent what the case says."""
        case = self.case
        if case.state in PARENT_STATES:
            await self._play_in_parent()
            return
        await self._reach()
        self.event_s = trio.current_time()
        if case.state == "idle" and case.fault != "none":
            await self._hurt_idle_worker()
        if case.parent == "none":
            self.deadline_s = 25.0 if case.device == "real" else 12.0
            if survives(case):
                await self._finish_surviving()
            return
        self.event_s = trio.current_time()
        await self._do_to_parent()

    async def _play_in_parent(self) -> None:
        """The fault hook does it, in the very stage; only a cancellation comes from here."""
        parent = self.case.parent
        await self.says("listening on")
        self.event_s = trio.current_time()
        self.deadline_s = AT_ONCE_S + 2.0
        if parent == "cancel":
            await self._do_to_parent()
        elif parent == "second SIGINT":
            await self.says("SIGINT: ")
            self._signal(signal.SIGINT)

    async def _reach(self) -> None:
        """Wait until the server is in the state, and the fault where the case wants it."""
        case = self.case
        if case.state in HELD_STATES:
            await self._stage_runs(case.state.split()[0])
        elif case.state in STAGE_STATES:
            await self.says(f"fault hook {case.state}")
            if case.effect == "hangs" and case.state != "hello":
                await self._refused("/v1/completions")
        elif case.state == "idle":
            await self.says("ready after")
        elif case.state == "restarting":
            await self.says("ready after")
            os.kill(self._worker(), signal.SIGKILL)
            await self.says("restart 1 in")
            if case.fault != "none":
                await self.says(f"fault hook {self._place()}")
        else:
            await self._reach_step()

    async def _reach_step(self) -> None:
        case = self.case
        await self.says("ready after")
        for who, first in (("marked", MARK), ("marked plain", MARK), ("bystander", OTHER)):
            self._clients.start_soon(self._client, who, first)
        if case.state == "draining":
            await self._first_delta.wait()
            if case.parent == "cancel":  # a program that embeds the server has its own reasons
                assert self._process.stdin is not None
                await self._process.stdin.send_all(b"drain\n")
                await self.says("draining")
            else:
                self._signal(signal.SIGTERM)
                await self.says("SIGTERM: ")
        if case.fault in ("nan", "inf"):
            await self.says("fault hook: logits")
        elif case.fault != "none":
            await self.says("fault hook decode" if "decode" in self._place() else "fault hook p")
        elif case.state == "decoding":
            await self._first_delta.wait()

    async def _hurt_idle_worker(self) -> None:
        os.kill(self._worker(), signal.SIGKILL if self.case.fault == "kill" else signal.SIGSTOP)
        if self.case.fault == "stop" and self.case.parent == "none":
            self._clients.start_soon(self._client, "marked", MARK)

    async def _do_to_parent(self) -> None:
        case, slow = self.case, self.case.effect == "hangs"
        self.deadline_s = AT_ONCE_S
        match case.parent:
            case "kill":
                self.deadline_s = GONE_S
                self._process.kill()
            case "cancel":
                assert self._process.stdin is not None
                with contextlib.suppress(trio.BrokenResourceError):  # the fault was quicker
                    await self._process.stdin.send_all(b"cancel\n")
            case "second SIGINT":
                self._signal(signal.SIGINT)
                with trio.move_on_after(0.5):
                    await self.says("SIGINT: ")
                self._signal(signal.SIGINT)
            case name:
                self._signal(signal.Signals[name])
                if case.state in ("prefilling", "decoding"):
                    self.deadline_s = DRAIN_S + LADDER_S + 2.0 if slow else 8.0
                elif case.state == "idle" and slow:
                    self.deadline_s = LADDER_S + 2.0

    async def _finish_surviving(self) -> None:
        """The server goes on: it answers as ever, then drains."""
        if self.case.state == "draining":
            return
        expected_ready = 2 if "ready after" in self.log and self._will_restart() else 1
        await self.says("ready after", times=expected_ready)
        before = [answer for answer in self.answers if answer.who == "bystander"]
        again = Answer("again")
        await self._ask(again, OTHER, stream=False)
        if again.kind != "complete":
            raise Wrong(f"after the fault a request got {again}")
        for answer in before:
            if answer.kind == "complete" and answer.text != again.text:
                raise Wrong(f"a bystander got {answer.text!r} instead of {again.text!r}")
        self.event_s = trio.current_time()
        self.deadline_s = 5.0
        self._signal(signal.SIGTERM)

    def _will_restart(self) -> bool:
        case = self.case
        return case.state == "restarting" or case.effect in ("dies", "hangs")

    def _signal(self, number: signal.Signals) -> None:
        """As a service manager, or a terminal, sends it."""
        if self._process.returncode is not None:
            return
        if number is signal.SIGINT:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    # ------------------------------------------------------------------------------ watching

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return self._raw_log.decode(errors="replace")

    async def says(self, text: str, times: int = 1) -> None:
        """Wait until the log holds ``text``; the server's end, if it comes first, ends the wait."""
        try:
            with trio.fail_after(REACH_S):
                while self._raw_log.count(text.encode()) < times:
                    if self._log_ended.is_set():
                        return
                    await self._grown.wait()
        except trio.TooSlowError:
            raise Wrong(f"{text!r} was never said") from None

    async def _stage_runs(self, stage: str) -> None:
        await self.says("listening on")
        with trio.fail_after(REACH_S):
            while True:
                _, body = await self._request("GET", "/startup")
                stages = {s["name"]: s["state"] for s in json.loads(body)["stages"]}
                if stages[stage] == "running":
                    return
                await trio.sleep(0.02)

    async def _refused(self, path: str) -> None:
        """While it loads, a request has its answer at once."""
        raw = bytearray()
        with trio.move_on_after(10) as patience:
            request = self._request("POST", path, {"prompt": "x"}, lambda data: raw.extend(data))
            status, body = await request
        if patience.cancelled_caught:
            self._process.send_signal(signal.SIGUSR1)  # it writes its stacks
            await trio.sleep(0.5)
            raise Wrong(f"while loading a request got {bytes(raw)!r} and no end in 10 s")
        if status != 503 or b"error" not in body:
            raise Wrong(f"while loading a request got {status} {body[:200]!r}")

    def _worker(self) -> int:
        workers = [pid for pid in self.tree() if b"trioserve.core" in command_line(pid)]
        if len(workers) != 1:
            raise Wrong(f"{len(workers)} workers instead of one")
        return workers[0]

    def tree(self) -> list[int]:
        """Live processes of this case, however far they have gone from their parent."""
        marker = f"KILL_MATRIX={self.marker}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/environ", "rb") as environment:
                        if marker in environment.read().split(b"\0"):
                            found.append(int(name))
                except OSError:
                    continue
        return found

    def kill_all(self) -> None:
        for pid in self.tree():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    # ------------------------------------------------------------------------------- clients

    async def _client(self, who: str, first: int) -> None:
        answer = Answer(who)
        self.answers.append(answer)
        await self._ask(answer, first, stream="plain" not in who)
        answer.came.set()

    async def _ask(self, answer: Answer, first: int, *, stream: bool) -> None:
        body = {
            "prompt": [first] * 40,
            "max_tokens": 80,
            "ignore_eos": True,
            "temperature": 0,
            "stream": stream,
        }
        status, raw = await self._request("POST", "/v1/completions", body, self._saw)
        text = raw.decode(errors="replace")
        if status >= 400:
            answer.kind = "error" if '"error"' in text else "cut"
            answer.text = text
        elif not stream:
            answer.kind = "complete" if text.endswith("}") else "cut"
            answer.text = json.loads(text)["choices"][0]["text"] if answer.kind != "cut" else text
        else:
            events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
            if events and events[-1].strip() == "[DONE]":
                answer.kind = "complete"
                answer.text = "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])
            else:
                answer.kind = "error" if events and '"error"' in events[-1] else "cut"
                answer.text = text[-500:]

    def _saw(self, raw: bytes) -> None:
        if b"data: " in raw:
            self._first_delta.set()

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        on_data: Callable[[bytes], object] = lambda raw: None,
    ) -> tuple[int, bytes]:
        """One request on a connection of its own; status 0 where there was no answer."""
        raw = b""
        payload = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        try:
            async with await self._connect() as connection:
                await connection.send_all(head.encode() + payload)
                async for data in connection:
                    raw += data
                    on_data(raw)
        except (OSError, trio.BrokenResourceError):
            pass
        top, _, rest = raw.partition(b"\r\n\r\n")
        if not top.startswith(b"HTTP/1.1 "):
            return 0, b""
        if b"transfer-encoding: chunked" in top.lower():
            rest = unchunk(rest)
        return int(top.split()[1]), rest

    async def _connect(self) -> AbstractAsyncContextManager[trio.SocketStream]:
        if self.case.listener == "uds":
            return await trio.open_unix_socket(str(self.socket_path))
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log)
        if not found:
            raise Wrong("no port is known")
        return await trio.open_tcp_stream("127.0.0.1", int(found[1]))

    # -------------------------------------------------------------------------- what must hold

    async def ended(self) -> int:
        """The parent's exit code, within the deadline."""
        limit_s = self.deadline_s * self.slack + 1.0  # a second for the processes to be collected
        started = self.event_s if self.event_s == self.event_s else trio.current_time()
        await self._ends_within(started + limit_s - trio.current_time())
        code = self._process.returncode
        if code is None:
            state = process_state(self._process.pid)
            self._process.send_signal(signal.SIGABRT)  # its stacks go to the log
            with trio.move_on_after(1.0):
                await self._process.wait()
            raise Wrong(f"still there {limit_s:g} s after the event, in state {state}")
        self.outcome_s = trio.current_time() - started
        return code

    async def _ends_within(self, seconds: float) -> None:
        """Counts only time in which this process ran, so that a machine that stands still for
        seconds does not make the server late."""
        for _ in range(max(1, math.ceil(seconds / TICK_S))):
            with trio.move_on_after(TICK_S):
                await self._process.wait()
                return

    async def check_nothing_left(self) -> None:
        """No process, no pipe, no socket, and every client has its answer."""
        left = self.tree()
        for _ in range(math.ceil(GONE_S * self.slack / TICK_S)):
            if not (left := self.tree()):
                break
            await trio.sleep(TICK_S)
        if left:
            names = [f"{pid} {command_line(pid)!r}" for pid in left]
            raise Wrong(f"processes are left: {', '.join(names)}")
        with trio.move_on_after(1.0):
            await self._log_ended.wait()
        if not self._log_ended.is_set():
            raise Wrong("somebody holds the log's pipe open")
        if self.case.listener == "uds" and self.case.parent != "kill" and self.socket_path.exists():
            raise Wrong("the socket's file is left")
        with trio.move_on_after(1.0):
            for answer in self.answers:
                await answer.came.wait()
        if silent := [answer.who for answer in self.answers if not answer.kind]:
            raise Wrong(f"no answer for {', '.join(silent)}")

    def check_end(self, code: int) -> None:
        """The exit code, and the cause in the last line."""
        case = self.case
        allowed = exit_codes(case)
        if code not in allowed:
            raise Wrong(f"exit code {code}, expected {sorted(allowed)}")
        if code == 70:
            if "Traceback" not in self.log or "fault hook" not in self.log:
                raise Wrong("a bug of the parent without a traceback")
            return
        if code in (4, 5, 6) and not re.search(cause(case), self.last_line):
            raise Wrong(f"the last line does not match {cause(case)!r}: {self.last_line!r}")
        if code in (0, 7, 130, 143) and case.fault not in ("raise", "memory", "nan", "inf"):
            for bad in ("Traceback", "a bug in the server", "Exception"):
                if bad in self.log:
                    raise Wrong(f"{bad} in the log")

    @property
    def last_line(self) -> str:
        lines = self.log.rstrip().splitlines() or [""]
        if self.case.listener == "uds" and lines[-1].startswith("{"):
            return str(json.loads(lines[-1])["message"])
        return lines[-1]

    def check_answers(self) -> None:
        """Each client was told, as well as the way down allows."""
        case = self.case
        if case.parent in ("kill", "cancel", "second SIGINT"):
            return  # abrupt: the end of the connection tells them
        if case.state == "draining" and case.parent != "none":
            return
        for answer in self.answers:
            allowed = {"error"}
            marked = answer.who.startswith("marked")
            if case.effect == "none" or (case.effect == "fails one" and not marked):
                allowed = {"complete"}
            if case.effect in ("dies", "hangs") and not marked:
                allowed = {"error", "complete"}
            if answer.kind not in allowed:
                self.problems.append(f"{answer} instead of {sorted(allowed)}")
