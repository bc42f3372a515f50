"""What the CPU device finds out, on made-up machines."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from trioserve.config.schema import Config, EngineConfig
from trioserve.devices import cpu

GIB = 1 << 30
AUTO = Config()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class Machine:
    """Files of proc and sys below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal:  {24 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {16 << 20} kB\n"
            f"CommitLimit: {12 << 20} kB\nCommitted_AS: {5 << 20} kB\nHugePages_Total: 0\n",
        )
        self.write("proc/sys/vm/overcommit_memory", "0\n")
        self.write("proc/self/statm", "1000 500 10\n")
        self.write("proc/cpuinfo", "processor : 0\nflags : fpu avx2 fma f16c sse2\n")
        self.write("proc/self/cgroup", "0::/\n")

    def cores(self, cores: list[tuple[int, ...]]) -> None:
        """Which processors share a core."""
        for core in cores:
            for processor in core:
                topology = f"sys/devices/system/cpu/cpu{processor}/topology"
                self.write(f"{topology}/core_cpus_list", ",".join(map(str, core)))

    def nodes(self, lists: list[str]) -> None:
        """Memory nodes by their processors."""
        for number, processors in enumerate(lists):
            self.write(f"sys/devices/system/node/node{number}/cpulist", processors)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def test_memory_of_the_machine(machine: Machine) -> None:
    assert cpu.memory(machine.root) == (24 * GIB, 16 * GIB)


def test_strict_overcommit_leaves_less(machine: Machine) -> None:
    machine.write("proc/sys/vm/overcommit_memory", 2)
    assert cpu.memory(machine.root) == (24 * GIB, 7 * GIB)


def test_the_tightest_group_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/outer/inner")
    machine.write("sys/fs/cgroup/outer/memory.max", 8 * GIB)
    machine.write("sys/fs/cgroup/outer/memory.current", 7 * GIB)
    machine.write("sys/fs/cgroup/outer/inner/memory.max", "max")
    machine.write("sys/fs/cgroup/outer/inner/memory.current", GIB)
    assert cpu.memory(machine.root) == (8 * GIB, 1 * GIB)
    # Files read count as the group's, but the kernel gives them back.
    machine.write("sys/fs/cgroup/outer/memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert cpu.memory(machine.root) == (8 * GIB, 3 * GIB)


def test_a_container_sees_its_group_as_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/host/path/not/seen/here")
    machine.write("sys/fs/cgroup/memory.max", 2 * GIB)
    machine.write("sys/fs/cgroup/memory.current", GIB // 2)
    assert cpu.memory(machine.root) == (2 * GIB, 3 * GIB // 2)


def test_groups_of_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job")
    base = "sys/fs/cgroup/memory/job"
    machine.write(f"{base}/memory.limit_in_bytes", 4 * GIB)
    machine.write(f"{base}/memory.usage_in_bytes", 3 * GIB)
    machine.write(f"{base}/memory.stat", f"total_inactive_file {GIB}")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 3 * GIB)
    assert cpu.memory(machine.root) == (4 * GIB, 2 * GIB)


def test_more_used_than_allowed_is_nothing_free(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job")
    machine.write("sys/fs/cgroup/job/memory.max", GIB)
    machine.write("sys/fs/cgroup/job/memory.current", 2 * GIB)
    assert cpu.memory(machine.root) == (GIB, 0)


def test_address_space_limit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (GIB, resource.RLIM_INFINITY))
    total, free = cpu.memory(machine.root)
    assert total == GIB
    assert free == GIB - 1000 * resource.getpagesize()


def test_this_machine_has_memory() -> None:
    total, free = cpu.memory()
    assert 0 < free <= total


def test_peak_memory_sees_what_came_and_went() -> None:
    peak = cpu.PeakMemory()
    block = bytearray(64 << 20)
    del block
    assert peak.rise() >= 60 << 20


def test_threads_follow_the_configuration(machine: Machine) -> None:
    settings = Config(engine=EngineConfig(threads=7))
    assert cpu.thread_count(settings, machine.root) == (7, "[engine] threads")


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.usefixtures("eight")
class TestThreads:
    def test_affinity(self, machine: Machine) -> None:
        assert cpu.thread_count(AUTO, machine.root) == (8, "processors allowed")

    @pytest.mark.parametrize(
        ("quota", "threads"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8)]
    )
    def test_quota(self, machine: Machine, quota: str, threads: int) -> None:
        machine.write("proc/self/cgroup", "0::/job")
        machine.write("sys/fs/cgroup/job/cpu.max", quota)
        assert cpu.thread_count(AUTO, machine.root)[0] == threads

    def test_quota_of_version_1(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job")
        machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", 300000)
        machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", 100000)
        assert cpu.thread_count(AUTO, machine.root)[0] == 3

    def test_quota_of_a_group_further_up(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/outer/inner")
        machine.write("sys/fs/cgroup/outer/cpu.max", "300000 100000")
        machine.write("sys/fs/cgroup/outer/inner/cpu.max", "max 100000")
        expected = (3, "the control group's processor quota")
        assert cpu.thread_count(AUTO, machine.root) == expected

    def test_two_processors_of_a_core_count_once(self, machine: Machine) -> None:
        machine.cores([(0, 4), (1, 5), (2, 6), (3, 7)])
        assert cpu.thread_count(AUTO, machine.root) == (4, "cores allowed")

    def test_a_core_of_which_one_processor_is_allowed_counts(self, machine: Machine) -> None:
        machine.cores([(0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)])
        assert cpu.thread_count(AUTO, machine.root)[0] == 8

    def test_one_memory_node_is_used(self, machine: Machine) -> None:
        machine.nodes(["0-2", "3-11", ""])  # the third has memory alone
        expected = (5, "cores of memory node 1 of 2")
        assert cpu.thread_count(AUTO, machine.root) == expected

    def test_the_quota_holds_on_a_node_too(self, machine: Machine) -> None:
        machine.nodes(["0-3", "4-7"])
        machine.write("proc/self/cgroup", "0::/job")
        machine.write("sys/fs/cgroup/job/cpu.max", "200000 100000")
        assert cpu.thread_count(AUTO, machine.root)[0] == 2


@pytest.mark.parametrize(("processors", "threads"), [(2, 2), (8, 8), (9, 8), (32, 31)])
def test_one_of_many_processors_is_left_to_the_front_end(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, processors: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert cpu.thread_count(AUTO, machine.root)[0] == threads


def test_none_is_left_where_cores_have_two_processors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    machine.cores([(i, 16 + i) for i in range(16)])
    assert cpu.thread_count(AUTO, machine.root) == (16, "cores allowed")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What this process was bound to."""
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, to: calls.append(set(to)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return calls


@pytest.mark.usefixtures("eight")
class TestBinding:
    def test_to_the_node_that_is_used(self, machine: Machine, bound: list[set[int]]) -> None:
        machine.nodes(["0-3", "4-7"])
        cpu.prepare_environment(AUTO, machine.root)
        assert bound == [{0, 1, 2, 3}]
        assert os.environ["OMP_NUM_THREADS"] == "4"

    def test_not_on_one_node(self, machine: Machine, bound: list[set[int]]) -> None:
        machine.nodes(["0-15"])
        cpu.prepare_environment(AUTO, machine.root)
        assert bound == []

    def test_not_where_threads_are_set(self, machine: Machine, bound: list[set[int]]) -> None:
        machine.nodes(["0-3", "4-7"])
        cpu.prepare_environment(Config(engine=EngineConfig(threads=8)), machine.root)
        assert bound == []

    def test_a_sandbox_that_forbids_it_is_no_fault(
        self, machine: Machine, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(pid: int, to: set[int]) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "sched_setaffinity", forbidden)
        machine.nodes(["0-3", "4-7"])
        cpu.prepare_environment(AUTO, machine.root)
        assert os.environ["OMP_NUM_THREADS"] == "4"


def test_features(machine: Machine) -> None:
    assert cpu.detect(AUTO, machine.root).features == ("avx2", "fma", "f16c")
    machine.write("proc/cpuinfo", "processor: 0\nFeatures : fp asimd")
    assert cpu.detect(AUTO, machine.root).features == ("asimd",)
    arm = "fp asimd evtstrm fphp asimdhp asimddp sve i8mm bf16"
    machine.write("proc/cpuinfo", f"processor: 0\nFeatures : {arm}")
    known = ("asimd", "asimddp", "fphp", "i8mm", "bf16", "sve")
    assert cpu.detect(AUTO, machine.root).features == known
    machine.write("proc/cpuinfo", "nothing known")
    assert "no vector extensions known" in cpu.detect(AUTO, machine.root).describe()


def test_the_environment_is_set_but_not_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    cpu.prepare_environment(Config(engine=EngineConfig(threads=3)))
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["MKL_NUM_THREADS"] == "3"
    monkeypatch.delenv("MKL_NUM_THREADS")
