"""Processes as /proc shows them: the tree under one, its memory, its processor time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Field of /proc/PID/status or smaps_rollup: our name. All are in KiB there.
MEMORY_FIELDS = {
    "VmRSS": "rss_mib",
    "RssAnon": "rss_anon_mib",
    "RssFile": "rss_file_mib",
    "RssShmem": "rss_shmem_mib",
    "VmHWM": "peak_rss_mib",
    "VmSwap": "swap_mib",
    "Pss": "pss_mib",
}


def tree_of(pid: int) -> list[int]:
    """``pid`` and all processes under it, parents first."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        if (fields := _stat(int(directory.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(directory.name))
    found = [pid]
    for parent in found:
        found.extend(children.get(parent, ()))
    return found


def name_of(pid: int) -> str:
    """What the process is to trioserve, else its program."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    if "trioserve.core" in words:
        return "worker"
    return Path(words[0]).name


def memory_of_tree(pid: int) -> dict[str, dict[str, float]]:
    """Memory of each process by its name, and of all together, in MiB.

    Resident memory counts pages that processes share once for each; "pss_mib" divides them.
    """
    result: dict[str, dict[str, float]] = {}
    total: dict[str, float] = {}
    for index, process in enumerate(tree_of(pid)):
        memory = memory_of(process)
        name = name_of(process) if index else "parent"
        result[name if name not in result else f"{name}-{process}"] = memory
        for field, value in memory.items():
            total[field] = round(total.get(field, 0.0) + value, 2)
    return result | {"total": total}


def memory_of(pid: int) -> dict[str, float]:
    """Memory of one process in MiB; what the kernel does not tell is left out."""
    text = ""
    for file in ("status", "smaps_rollup"):
        try:
            text += Path(f"/proc/{pid}/{file}").read_text()
        except OSError:
            continue
    memory = {}
    for line in text.splitlines():
        field, _, value = line.partition(":")
        if field in MEMORY_FIELDS:
            memory[MEMORY_FIELDS[field]] = round(int(value.split()[0]) / 1024, 2)
    return memory


def beyond_weights_and_cache(worker: dict[str, float], info: dict[str, Any]) -> dict[str, float]:
    """A worker's resident memory, own and mapped, beside what a model cannot be without, in MiB.

    ``info`` is that of ``/startup``. The cache counts whole although its pages are taken as they
    are first written: only after a load that has filled it does ``beyond_mib`` tell much.
    """
    weights, cache = (info[name] / 2**20 for name in ("weight_bytes", "kv_cache_bytes"))
    return {
        "worker_mib": worker["rss_mib"],
        "weights_mib": round(weights, 2),
        "cache_mib": round(cache, 2),
        "beyond_mib": round(worker["rss_mib"] - weights - cache, 2),
    }


def cpu_s_of_tree(pid: int) -> float:
    """Processor seconds so far of the processes that now live in the tree, ended children too."""
    ticks = 0
    for process in tree_of(pid):
        if (fields := _stat(process)) is not None:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_s_of(pid: int) -> float:
    """Processor seconds so far of one process, all threads; 0 if it is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before may hold blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def own_bytes(pid: int) -> int:
    """Memory that is the process's alone, swapped out or not: what a leak makes grow."""
    memory = memory_of(pid)
    return round((memory.get("rss_anon_mib", 0.0) + memory.get("swap_mib", 0.0)) * 2**20)


def num_descriptors(pid: int) -> int:
    """Open descriptors of a process; 0 if it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def processor_times() -> tuple[float, float, float]:
    """Seconds so far: of all processors, of those in use or taken by the host, and of this process
    and its children that have ended."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]  # idle, and waiting for a device
    times = os.times()
    return (sum(fields) / ticks, (sum(fields) - idle) / ticks, sum(times[:4]))


def foreign_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """What others used of all processors between two of ``processor_times``, 0 to 1."""
    whole, used, own = (later - earlier for earlier, later in zip(before, after, strict=True))
    return min(1.0, max(0.0, (used - own) / whole)) if whole > 0 else 0.0
