"""Faults on purpose, for tests: ``[test] faults = ["PLACE[@N][#INCARNATION]:KIND[:ARG]", ...]``.

Without that setting nothing of this module is imported by the worker and nothing is wrapped. With
it, the parent hands the faults of an incarnation to its worker in an environment variable, since
some act before the worker has read its first command.

Places: a start-up stage, as it starts; ``hello``, before Hello is sent; ``prefill``, ``decode`` and
``sample``, when a marked sequence comes there (with ``@N``, its N-th decode or sampled token).
Marked are the sequences whose first token is ``test.mark_token_id``, or all where that is not set.
The stages resolve, fetch, inspect and spawn are the parent's and take ``raise``, ``kill`` and
``signal``; all others are the worker's.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import attrs

from trioserve.config.schema import FAULTS_VARIABLE, Config
from trioserve.core.batch import Executor, MemoryProfile, SampledRow, ScheduledBatch
from trioserve.core.stages import StageReporter
from trioserve.errors import ConfigError
from trioserve.ipc.messages import PROTOCOL, STAGES, Hello, Stage

PARENT_PLACES = ("resolve", "fetch", "inspect", "spawn")
STEP_PLACES = ("prefill", "decode", "sample")
WORKER_PLACES = ("hello", *(name for name in STAGES if name not in PARENT_PLACES), *STEP_PLACES)

ANYWHERE = ("raise", "kill", "signal")
IN_WORKER = (*ANYWHERE, "exit", "sleep", "gil", "memory", "stderr", "stdout", "garbage")
ONLY_AT = {"protocol": "hello", "device-memory": "profile", "nan": "sample", "inf": "sample"}
ARGUMENT = {"exit": (0, 255), "signal": (1, 64), "device-memory": (0, 2**62)}

HEADROOM_BYTES = 256 * 1024 * 1024  # that "memory" may take beyond what the process has
_MIB = 1024 * 1024
_SPEC = re.compile(
    r"(?P<place>[a-z-]+)(@(?P<nth>[1-9]\d*))?(#(?P<incarnation>[1-9]\d*))?"
    r":(?P<kind>[a-z-]+)(:(?P<argument>\d+))?"
)


@attrs.frozen
class Fault:
    """One fault. ``text`` is how it was written."""

    text: str
    place: str
    kind: str
    argument: int = 0
    nth: int | None = None
    incarnation: int | None = None


def parse_fault(text: str) -> Fault:
    """A fault as it is written in the configuration.

    Raises:
        ConfigError: it is no fault, or of a kind that its place cannot have.
    """
    found = _SPEC.fullmatch(text)
    if not found:
        raise ConfigError(f"'{text}' is no fault; expected PLACE[@N][#INCARNATION]:KIND[:ARG]")
    place, kind, argument = found["place"], found["kind"], found["argument"]
    if place not in PARENT_PLACES and place not in WORKER_PLACES:
        places = ", ".join((*PARENT_PLACES, *WORKER_PLACES))
        raise ConfigError(f"'{text}': no place {place}; there are {places}")
    if kind not in kinds_at(place):
        raise ConfigError(f"'{text}': at {place} a fault is one of {', '.join(kinds_at(place))}")
    if found["incarnation"] and place in PARENT_PLACES:
        raise ConfigError(f"'{text}': #INCARNATION goes with the worker's places")
    if found["nth"] and place not in ("decode", "sample"):
        raise ConfigError(f"'{text}': @N goes with decode and sample")
    if (kind in ARGUMENT) != (argument is not None):
        needed = "needs a number" if kind in ARGUMENT else "takes no number"
        raise ConfigError(f"'{text}': {kind} {needed}")
    if argument is not None:
        low, high = ARGUMENT[kind]
        if not low <= int(argument) <= high:
            raise ConfigError(f"'{text}': the number must lie between {low} and {high}")
    return Fault(
        text, place, kind, int(argument or 0), _number(found["nth"]), _number(found["incarnation"])
    )


def kinds_at(place: str) -> tuple[str, ...]:
    """The kinds of faults that a place can have."""
    if place in PARENT_PLACES:
        return ANYWHERE
    return (*IN_WORKER, *(kind for kind, only in ONLY_AT.items() if only == place))


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


# ------------------------------------------------------------------------------- the parent's


def of_incarnation(config: Config, number: int) -> Config:
    """The configuration without the faults of other incarnations than the ``number``-th."""
    faults = [parse_fault(text) for text in config.test.faults]
    kept = tuple(fault.text for fault in faults if fault.incarnation in (None, number))
    return attrs.evolve(config, test=attrs.evolve(config.test, faults=kept))


def parent_faults(config: Config) -> Faults:
    """The faults of the parent's own stages.

    Raises:
        ConfigError: faults that are not allowed. Their check in ``trioserve.config`` comes first,
            except for a Config that was made by hand.
    """
    if not config.test.allow_faults:
        raise ConfigError("test.faults are for tests; they need test.allow_faults = true")
    faults = map(parse_fault, config.test.faults)
    return Faults([fault for fault in faults if fault.place in PARENT_PLACES])


def worker_environment(config: Config) -> Mapping[str, str] | None:
    """The environment of a worker with the faults of ``config``; None for ours, unchanged."""
    faults = [fault for fault in config.test.faults if parse_fault(fault).place in WORKER_PLACES]
    if not faults:
        return None
    value = {"faults": faults, "mark_token_id": config.test.mark_token_id}
    return {**os.environ, FAULTS_VARIABLE: json.dumps(value)}


# ------------------------------------------------------------------------------- both sides'


class Faults:
    """The faults of one process, to be fired where they belong.

    Args:
        faults: those of this process.
        mark_token_id: see the module; None marks every sequence.
        event_fd: the write end of the event pipe, for "garbage".
    """

    def __init__(
        self, faults: list[Fault], mark_token_id: int | None = None, event_fd: int | None = None
    ) -> None:
        self._faults = faults
        self._event_fd = event_fd
        self.mark_token_id = mark_token_id

    @classmethod
    def from_environment(cls, value: str, argv: list[str]) -> Faults:
        """The worker's, from ``FAULTS_VARIABLE`` and its arguments; says so on stderr."""
        given = json.loads(value)
        faults = [parse_fault(text) for text in given["faults"]]
        _say(f"WARNING fault hooks are on: {', '.join(fault.text for fault in faults)}")
        return cls(faults, given["mark_token_id"], int(argv[-1].split(",")[1]))

    def at(self, place: str, nth: int | None = None) -> list[Fault]:
        """The faults of a place, in the order in which they were given."""
        return [f for f in self._faults if f.place == place and f.nth in (None, nth)]

    def watch_stages(self, send: Callable[[Stage], None]) -> Callable[[Stage], None]:
        """``send``, and then the faults of the stage that starts."""

        def send_and_fire(stage: Stage) -> None:
            send(stage)
            if stage.state == "start":
                for fault in self.at(stage.name):
                    self.fire(fault)

        return send_and_fire

    def change_hello(self, hello: Hello) -> Hello:
        """Fire what belongs before Hello; the Hello to send."""
        for fault in self.at("hello"):
            if fault.kind == "protocol":
                _say(f"ERROR fault hook {fault.text}")
                hello = Hello(PROTOCOL + 1, hello.version, hello.pid)
            else:
                self.fire(fault)
        return hello

    def wrap(self, executor: Executor) -> Executor:
        """The executor with the faults around it."""
        return cast(Executor, FaultyExecutor(executor, self))

    def fire(self, fault: Fault) -> None:
        """Do it. Kinds that need a device are passed over: ``FaultyExecutor`` does those."""
        if fault.kind in ONLY_AT:
            return
        _say(f"ERROR fault hook {fault.text}")
        match fault.kind:
            case "raise":
                raise RuntimeError(f"fault hook {fault.text}")
            case "exit":
                os._exit(fault.argument)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "signal":
                os.kill(os.getpid(), fault.argument)
            case "sleep":
                while True:
                    time.sleep(1000)
            case "gil":
                hold_gil()
            case "memory":
                allocate_until_refused()
            case "stderr":
                write_10_mb()
            case "stdout":
                print("fault hook: printed to stdout", flush=True)
                os.write(1, b"fault hook: written to descriptor 1\n")
            case "garbage":
                assert self._event_fd is not None
                os.write(self._event_fd, b"\x08\x00\x00\x00garbage!")


def hold_gil() -> NoReturn:
    """Wait in native code, with the GIL held, for what never comes."""
    read, _ = os.pipe()
    library = ctypes.PyDLL(None)
    buffer = ctypes.create_string_buffer(1)
    while True:
        library.read(read, buffer, 1)


def allocate_until_refused() -> NoReturn:
    """Allocate until the system refuses; a limit of our own comes before the machine's.

    Raises:
        MemoryError: always.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limit = used + HEADROOM_BYTES
    for other in (soft, hard):
        limit = limit if other == resource.RLIM_INFINITY else min(limit, other)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    held = []
    try:
        while True:
            held.append(bytearray(16 * _MIB))
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def write_10_mb() -> None:
    """Ten megabytes to stderr: one line without an end in sight, then many short ones."""
    for _ in range(5):
        _write(b"x" * _MIB)
    _write(b"\n")
    for _ in range(5):
        _write((b"y" * 127 + b"\n") * (_MIB // 128))


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(2, rest) :]


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


# ------------------------------------------------------------------------------ the executor


class FaultyExecutor:
    """An Executor around another, with the faults of profile, prefill, decode and sample.

    A fault of a marked sequence is found by its position, so it comes again when its row is tried
    alone. The self-test of start-up, whose sequences have negative ids, is never marked.
    """

    def __init__(self, inner: Executor, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._marked: dict[int, int] = {}  # id → number of prompt tokens
        self._sampling: list[tuple[int, int]] = []  # marked rows that sample: id, n-th token

    def __getattr__(self, name: str) -> Any:
        """Whatever has no fault is the inner executor's own."""
        return getattr(self._inner, name)

    def profile(self, report: StageReporter) -> MemoryProfile:
        """The inner profile, with made-up free memory where a fault says so."""
        profile = self._inner.profile(report)
        for fault in self._faults.at("profile"):
            if fault.kind == "device-memory":
                _say(f"ERROR fault hook {fault.text}")
                profile = MemoryProfile(
                    profile.total_bytes,
                    fault.argument,
                    profile.weight_bytes,
                    profile.activation_bytes,
                )
        return profile

    def execute(self, batch: ScheduledBatch) -> Any:
        """Fire for marked rows, before the inner executor has seen the batch."""
        for sequence_id in batch.removed_ids:
            self._marked.pop(sequence_id, None)
        mark = self._faults.mark_token_id
        for new in batch.new:
            if new.id >= 0 and mark in (None, new.token_ids[0]):
                self._marked[new.id] = new.num_prompt_tokens
        self._sampling = []
        for row in batch.rows:
            if row.id not in self._marked:
                continue
            nth = (
                row.start + row.num_tokens - self._marked[row.id]
            )  # of the tokens after the prompt
            if row.sample:
                self._sampling.append((row.id, nth + 1))
            decodes = row.num_tokens == 1 and nth > 0
            for fault in self._faults.at("decode" if decodes else "prefill", nth):
                self._faults.fire(fault)
        return self._inner.execute(batch)

    def sample(self, handle: Any, masks: Any = None) -> list[SampledRow]:
        """Fire for marked rows, between the forward pass and the choice of tokens."""
        poisoned: dict[int, float] = {}
        for sequence_id, nth in self._sampling:
            for fault in self._faults.at("sample", nth):
                self._faults.fire(fault)
                if fault.kind in ("nan", "inf"):
                    poisoned[sequence_id] = math.nan if fault.kind == "nan" else math.inf
        if not poisoned:
            return self._inner.sample(handle, masks)
        _say(f"ERROR fault hook: logits of {sorted(poisoned)} made {set(poisoned.values())}")
        if hasattr(handle, "logits"):
            _poison(handle, poisoned)
            return self._inner.sample(handle, masks)
        return [
            SampledRow(row.id, 0, error=f"the logits of the sequence hold {poisoned[row.id]}")
            if row.id in poisoned
            else row
            for row in self._inner.sample(handle, masks)
        ]


def _poison(handle: Any, poisoned: Mapping[int, float]) -> None:
    """Put one bad value among the logits of each row; the tensor belongs to inference mode."""
    import torch

    with torch.inference_mode():
        for index, sequence_id in enumerate(handle.ids):
            if sequence_id in poisoned:
                handle.logits[index, handle.logits.shape[1] // 2] = poisoned[sequence_id]
