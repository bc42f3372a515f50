"""The CPU as a device: what the processor offers, how many threads, how much memory.

Importing this loads nothing heavy: ``prepare_environment`` has to run before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from pathlib import Path

from attrs import frozen

from trioserve.config.schema import Config
from trioserve.devices.instructions import LEVELS, limit

FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512vbmi", "avx512_vnni", "amx_tile", "amx_bf16"),
    *("asimd", "asimddp", "fphp", "i8mm", "bf16", "sve"),
)
"""Processor features that the log names, by their names in /proc/cpuinfo: those that decide which
kernels run, ours and torch's."""
LEAVES_NONE = 8
"""Up to so many processors all compute: one of them is worth more there than what the front end
takes. Beyond, the front end would hold up all the others whenever it takes one."""
_UNLIMITED = 1 << 62


@frozen(kw_only=True)
class Processor:
    """What the machine has and what this process may use of it."""

    machine: str  # "x86_64", "aarch64"
    features: tuple[str, ...]  # of FEATURES, those that may be used
    limited: bool  # whether there might be more, but for [kernels] instructions
    threads: int  # compute threads
    reason: str  # where the number of threads comes from

    @property
    def reads_float16(self) -> bool:
        """Whether float16 in memory is widened by an instruction, not by a library call."""
        return "f16c" in self.features or self.machine == "aarch64"

    def describe(self) -> str:
        """One line for the log."""
        features = " ".join(self.features) or "no vector extensions known here"
        limit = "; no more by [kernels] instructions" if self.limited else ""
        return f"{self.machine} ({features}{limit}), {self.threads} threads ({self.reason})"


def detect(config: Config, root: Path = Path("/")) -> Processor:
    """Look at the processor. ``root`` is where proc and sys are found."""
    threads, reason = thread_count(config, root)
    wanted = config.kernels.instructions
    present = flags(root)
    if wanted != "auto":
        present &= frozenset(LEVELS[wanted].needs)
    return Processor(
        machine=platform.machine(),
        features=tuple(feature for feature in FEATURES if feature in present),
        limited=wanted != "auto",
        threads=threads,
        reason=reason,
    )


def prepare_environment(config: Config, root: Path = Path("/")) -> None:
    """Set what the libraries read when they are loaded, and where this thread and those that it
    starts run. Call before torch is imported.

    Threads that wait for the next phase spin for some 2,000 turns, about 0.1 ms, and then sleep:
    long enough for the next phase of a step (without spinning a step took 15 % longer), too short
    to keep the server's parent process from the processor. What the user has set stays.

    With ``threads`` "auto" on a machine of several memory nodes the process keeps to one of them.

    Raises:
        ModelError: the processor has less than ``[kernels] instructions`` names.
    """
    limit(config.kernels.instructions, flags(root), os.environ)
    threads, _ = thread_count(config, root)
    for name, value in (
        ("OMP_NUM_THREADS", str(threads)),
        ("MKL_NUM_THREADS", str(threads)),
        ("GOMP_SPINCOUNT", "2000"),
    ):
        os.environ.setdefault(name, value)
    if config.engine.threads == "auto":
        allowed = os.sched_getaffinity(0)
        node = _one_node(allowed, root)
        if node.processors < allowed:
            with contextlib.suppress(OSError):  # a sandbox may forbid it: slower, not wrong
                os.sched_setaffinity(0, node.processors)


def thread_count(config: Config, root: Path = Path("/")) -> tuple[int, str]:
    """Compute threads, and why.

    As configured, else by what this process may use: the cores of one memory node, since all
    threads wait for the slowest and memory of another node is slow; two processors of one core
    count once, since what they compute and read they share; of more than LEAVES_NONE that are all
    there is, one is left to the server's parent process; and no more than the control groups'
    quota lets run at a time.
    """
    if config.engine.threads != "auto":
        return config.engine.threads, "[engine] threads"
    allowed = os.sched_getaffinity(0)
    node = _one_node(allowed, root)
    threads = len({_core(processor, root) for processor in node.processors})
    reason = "processors allowed" if threads == len(allowed) else "cores allowed"
    if node.of > 1:
        reason = f"cores of memory node {node.number} of {node.of}"
    elif threads == len(allowed) > LEAVES_NONE:
        threads, reason = threads - 1, "processors allowed, one left to the front end"
    quota = _cpu_quota(root)
    if quota < threads:
        return max(1, int(quota)), "the control group's processor quota"
    return threads, reason


@frozen
class _Node:
    """A memory node: those of its processors that may be used, and how many nodes there are."""

    number: int
    processors: frozenset[int]
    of: int


def _one_node(allowed: set[int], root: Path) -> _Node:
    """The node with most of the allowed processors, of equals the first."""
    nodes: dict[int, set[int]] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if processors := _cpu_list(path / "cpulist"):  # a node may have memory alone
            nodes[int(path.name.removeprefix("node"))] = processors
    shares = {number: processors & allowed for number, processors in sorted(nodes.items())}
    if not any(shares.values()):
        return _Node(0, frozenset(allowed), 1)
    best = max(shares, key=lambda number: len(shares[number]))
    return _Node(best, frozenset(shares[best]), len(nodes))


def _core(processor: int, root: Path) -> int:
    """The first of the processors that share a core with this one."""
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    siblings = _cpu_list(topology / "core_cpus_list") or _cpu_list(
        topology / "thread_siblings_list"
    )
    return min(siblings, default=processor)


def _cpu_list(path: Path) -> set[int]:
    """A file like ``0-3,8,10-11``; nothing where it cannot be read."""
    processors: set[int] = set()
    for part in ",".join(_lines(path)).split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            processors.update(range(int(first), int(last or first) + 1))
    return processors


# -------------------------------------------------------------------------------- memory


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes in total and bytes this process could still take.

    The least of what the machine, each control group above this process and the process's own
    address-space limit allow. Page cache counts as free: the kernel gives it back.
    """
    info = _key_values(root / "proc/meminfo")
    total = info.get("MemTotal", 0) * 1024
    free = info.get("MemAvailable", info.get("MemFree", 0)) * 1024
    if _read_int(root / "proc/sys/vm/overcommit_memory") == 2:
        free = min(free, (info["CommitLimit"] - info["Committed_AS"]) * 1024)
    for most, used in _memory_groups(root):
        total = min(total, most)
        free = min(free, most - used)
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        pages = (root / "proc/self/statm").read_text().split()[0]
        total = min(total, most)
        free = min(free, most - int(pages) * resource.getpagesize())
    return total, max(0, free)


class PeakMemory:
    """Measures how far this process's resident memory rises above where it was."""

    def __init__(self) -> None:
        self._reset = _try_write(Path("/proc/self/clear_refs"), "5")  # peak := now
        self._before = _status_bytes("VmRSS")

    def rise(self) -> int:
        """Bytes of the highest point since the start; where the kernel keeps none, of now."""
        peak = _status_bytes("VmHWM" if self._reset else "VmRSS")
        return max(0, peak - self._before)


def _memory_groups(root: Path) -> list[tuple[int, int]]:
    """Limit and use in bytes of each control group with a memory limit that we are in."""
    groups = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit_name, used_name, reclaimable = names
        for group in _with_parents(base, path):
            limit = _read_int(group / limit_name)
            used = _read_int(group / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                cached = _key_values(group / "memory.stat").get(reclaimable, 0)
                groups.append((limit, max(0, used - cached)))
    return groups


def _cpu_quota(root: Path) -> float:
    """Processors that the control groups' quotas come to."""
    least = float("inf")
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for group in _with_parents(root / "sys/fs/cgroup", path):
                quota, _, period = next(iter(_lines(group / "cpu.max")), "max 1").partition(" ")
                if quota != "max":
                    least = min(least, int(quota) / int(period))
        elif "cpu" in controllers.split(","):
            for group in _with_parents(root / "sys/fs/cgroup" / controllers, path):
                quota_us = _read_int(group / "cpu.cfs_quota_us") or -1
                period_us = _read_int(group / "cpu.cfs_period_us")
                if quota_us > 0 and period_us:
                    least = min(least, quota_us / period_us)
    return least


def _with_parents(base: Path, path: str) -> list[Path]:
    """The group's directory and those above it, where they can be seen from in here."""
    group = base / path.strip().lstrip("/")
    if not group.is_dir():  # in a container the path is the host's, the mount is our own group
        group = base
    return [group, *(parent for parent in group.parents if parent.is_relative_to(base))]


def flags(root: Path = Path("/")) -> frozenset[str]:
    """All that the processor is said to have."""
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []


def _key_values(path: Path) -> dict[str, int]:
    """Lines like ``MemTotal:  1024 kB`` or ``inactive_file 4096``; units are not looked at."""
    pairs = (line.replace(":", " ").split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _read_int(path: Path) -> int | None:
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _status_bytes(name: str) -> int:
    return _key_values(Path("/proc/self/status")).get(name, 0) * 1024


def _try_write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True
