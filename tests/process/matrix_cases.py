"""The kill matrix as a table: which cases there are, and what each must end in.

A case is a state of the server, a fault of its worker in that state, and what happens to the parent
at that moment. All pairs of (state, fault), (state, parent), (fault, parent) that make sense occur,
and those with the policy on death and the kind of listener; nothing here is drawn by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from attrs import frozen

PARENT_STATES = ("resolve", "fetch", "inspect", "spawn")  # the parent is in this stage
HELD_STATES = ("fetch held", "inspect held")  # a hub, or a file system, that does not answer
STAGE_STATES = (
    "hello",
    "python",
    "device",
    "distributed",
    "weights",
    "profile",
    "kv-cache",
    "warm-up",
    "capture",
    "self-test",
    "ready",
)
STEP_STATES = ("prefilling", "decoding", "draining")
STATES = (*PARENT_STATES, *HELD_STATES, *STAGE_STATES, "idle", *STEP_STATES, "restarting")

IN_STAGE = (
    "exit",
    "raise",
    "kill",
    "signal",
    "sleep",
    "gil",
    "memory",
    "stderr",
    "stdout",
    "garbage",
)
FAULTS = ("none", *IN_STAGE, "protocol", "device-memory", "nan", "inf", "stop")
PARENTS = ("none", "kill", "cancel", "SIGTERM", "SIGINT", "second SIGINT")
POLICIES = ("exit", "restart")
LISTENERS = ("tcp", "uds")

REAL_STATES = (
    "python",
    "device",
    "weights",
    "profile",
    "kv-cache",
    "warm-up",
    "self-test",
    "idle",
    *STEP_STATES,
    "restarting",
)
HANGS = ("sleep", "gil", "stop")
HARMLESS = ("none", "stderr", "stdout")


@frozen
class Case:
    """One case; ``name`` tells it from all others."""

    state: str
    fault: str
    parent: str
    policy: str
    listener: str
    device: str = "simulated"

    @property
    def name(self) -> str:
        text = f"{self.state}/{self.fault}/{self.parent}/{self.policy}/{self.listener}"
        return text if self.device == "simulated" else f"{text}/{self.device}"

    @property
    def effect(self) -> str:
        """What the fault does to the worker: "none", "dies", "hangs", or "fails one" request."""
        if self.fault in HARMLESS or self.state in (*PARENT_STATES, *HELD_STATES):
            return "none"
        if self.fault in HANGS:
            return "hangs"
        if self.state in STEP_STATES and self.fault in ("raise", "memory", "nan", "inf"):
            return "fails one"
        return "dies"

    @property
    def pairs(self) -> set[tuple[str, str, str]]:
        values = (self.state, self.fault, self.parent, self.policy, self.listener)
        named = zip(("state", "fault", "parent", "policy", "listener"), values, strict=True)
        return {(f"{a}+{b}", x, y) for (a, x), (b, y) in itertools.combinations(named, 2)}


def faults_in(state: str) -> tuple[str, ...]:
    """The faults that a state can have."""
    if state in PARENT_STATES:
        return ("none", "raise")
    if state in HELD_STATES:
        return ("none",)
    if state == "idle":
        return ("none", "kill", "stop")
    if state == "restarting":
        return ("none", *IN_STAGE, "protocol")
    if state in STEP_STATES:
        return ("none", *IN_STAGE, "nan", "inf")
    return (*IN_STAGE, *{"hello": ("protocol",), "profile": ("device-memory",)}.get(state, ()))


def makes_sense(case: Case) -> bool:
    """Whether there is such a case at all."""
    if case.fault not in faults_in(case.state):
        return False
    if case.state in PARENT_STATES:
        # A bug of the parent, and nothing else; or nothing but what comes from outside.
        return (case.fault == "raise") == (case.parent == "none")
    if case.state in HELD_STATES:
        return case.parent != "none"
    return case.state != "restarting" or case.policy == "restart"


def all_cases(device: str = "simulated", states: Iterable[str] = STATES) -> Iterator[Case]:
    for state in states:
        for fault in faults_in(state):
            for rest in itertools.product(PARENTS, POLICIES, LISTENERS):
                case = Case(state, fault, *rest, device)
                if makes_sense(case):
                    yield case


def choose(cases: Iterable[Case]) -> list[Case]:
    """Cases enough for every pair of values that occurs in ``cases``: for each state and fault the
    one that brings the most new pairs, then what is still needed."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.state, case.fault), []).append(case)
    missing = {pair for group in groups.values() for case in group for pair in case.pairs}
    chosen: list[Case] = []

    def take(candidates: Iterable[Case]) -> None:
        best = max(candidates, key=lambda case: len(case.pairs & missing))
        missing.difference_update(best.pairs)
        chosen.append(best)

    for group in groups.values():
        take(group)
    everything = [case for group in groups.values() for case in group]
    while missing:
        take(everything)
    return chosen


def real_cases() -> list[Case]:
    """Two faults for each state with a real model, so that all faults have their turn."""
    kept = []
    turn = 0
    for state in REAL_STATES:
        faults = faults_in(state)
        for _ in range(2):
            kept += [
                case
                for case in all_cases("real", [state])
                if case.fault == faults[turn % len(faults)]
            ]
            turn += 5 if len(faults) % 5 else 3
    return choose_without_filling(kept)


def choose_without_filling(cases: Iterable[Case]) -> list[Case]:
    """One case for each state and fault, the parents' events spread over them."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.state, case.fault), []).append(case)
    missing = {pair for group in groups.values() for case in group for pair in case.pairs}
    chosen = []
    for group in groups.values():
        best = max(group, key=lambda case: len(case.pairs & missing))
        missing -= best.pairs
        chosen.append(best)
    return chosen


# ----------------------------------------------------------------------------- what must come

CAUSES = {
    "exit": r"exited with code 3; it last said: .*fault hook",
    "kill": r"signal 9 \(SIGKILL\); often .*memory.*: needed .*, available .*",
    "signal": r"signal 11 \(SIGSEGV\); it last said: Fatal Python error",
    "raise": r"RuntimeError: fault hook",
    "memory": r"out of memory",
    "garbage": r"no message of the protocol",
    "device-memory": r"the KV cache cannot hold",
    "sleep": r"no progress for",
    "gil": r"no progress for",
}
BEFORE_HELLO = {
    "exit": r"exited with code 3 before it said Hello; it last said: .*fault hook",
    "kill": r"signal 9 \(SIGKILL\) before it said Hello; often .*memory.*; it last said: ",
    "signal": r"signal 11 \(SIGSEGV\) before it said Hello; it last said: Fatal Python error",
    "raise": r"exited with code 1 before it said Hello; it last said: RuntimeError: fault hook",
    "memory": r"exited with code 1 before it said Hello; it last said: MemoryError",
    "protocol": r"with protocol \d.*restart after an upgrade",
    "sleep": r"did not say Hello within",
    "gil": r"did not say Hello within",
}


def cause(case: Case) -> str:
    """A pattern for the parent's last line when the fault has ended the server."""
    if case.state in PARENT_STATES:
        return ".*"
    if case.state == "hello":
        return BEFORE_HELLO.get(case.fault, CAUSES.get(case.fault, "?"))
    if case.fault in HANGS and case.state not in STAGE_STATES:
        return r"the worker is stuck"
    stage = case.state if case.state in STAGE_STATES else ""
    if case.fault == "device-memory":
        stage = "kv-cache"  # where the made-up size is found to be too small
    return rf"{stage}.*{CAUSES[case.fault]}" if stage else CAUSES[case.fault]


def death_code(case: Case) -> int:
    """The exit code when the fault ends the server."""
    if case.state == "hello":
        return 4
    return 5 if case.state in STAGE_STATES else 6


def survives(case: Case) -> bool:
    """Whether the server serves on after the fault, if it is left alone."""
    if case.state == "restarting":
        return True
    if case.effect in ("none", "fails one"):
        return True
    return case.policy == "restart" and case.state in ("idle", "prefilling", "decoding")


def exit_codes(case: Case) -> set[int]:
    """The exit codes that are right; more than one where two things happen at the same time."""
    if case.parent == "none":
        if case.state in PARENT_STATES:
            return {70}
        return {0} if survives(case) else {death_code(case)}
    # The death may be noticed before what happens to the parent, or after it.
    died = {death_code(case)} if case.effect == "dies" else set()
    if case.effect == "dies" and case.state == "restarting":
        died = {4, 5, 6}
    if case.parent == "kill":
        return {-9} | died
    if case.parent == "cancel":
        return {0} | died
    if case.parent == "second SIGINT":
        lasts = case.state in STEP_STATES and case.effect in ("none", "hangs", "fails one")
        return {130} if lasts else {0, 130} | died
    if case.state == "draining":  # the first signal is what made it drain
        return {143 if case.parent == "SIGTERM" else 130} | died
    if case.state in STEP_STATES and case.effect == "hangs":
        return {7}
    if case.state in STEP_STATES and case.effect == "dies":
        return {0, 6} if case.policy == "restart" else {6}
    return {0} | died
