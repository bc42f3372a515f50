"""KV-06 in short, on counts: five hundred requests of each kind, and nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import trio

import trioserve
from trioserve.config.schema import Config
from trioserve.engine.supervisor import as_config
from trioserve.http.listeners import bind
from trioserve.http.server import serve_http

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
try:
    from lib import misuse
    from lib.client import Target
    from soak import Sample, faults_of, growth
finally:
    sys.path.remove(str(BENCH))

NUM_REQUESTS = 500


def config() -> Config:
    return as_config(
        {
            "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
            "device": {"kind": "simulated"},
            "cache": {"memory": "4MiB"},
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 128},
            "http": {"port": 0},
        }
    )


def open_files(pid: int) -> Counter[str]:
    """How many descriptors of each kind a process has."""
    found: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the scan's own
            found[f"{pid} {os.readlink(entry.path).partition(':')[0]}"] += 1
    return found


async def smallest(engine: trioserve.Engine, counts: Callable[[], Counter[str]]) -> Counter[str]:
    """What is there once everything on its way has gone: the least of what is seen."""
    least = counts()
    for _ in range(200):
        await engine.check()
        least &= counts()
    return least


async def test_kv_06_nothing_is_left_of_any_kind_of_request() -> None:
    process = psutil.Process()
    num_children = len(process.children(recursive=True))
    served = config()
    listeners = bind(served.http)
    target = Target.of(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
    stopping = trio.Event()
    with trio.fail_after(120):
        async with trioserve.open_engine(served) as engine, trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[None]) -> None:
                await serve_http(
                    engine,
                    listeners,
                    served,
                    stopping=stopping,
                    drain_deadline_s=5.0,
                    task_status=task_status,
                )

            await nursery.start(serve)
            limits = misuse.Limits(engine.status.info.vocab_size, engine.max_model_len)
            [worker] = process.children()

            def counts() -> Counter[str]:
                tasks = trio.lowlevel.current_statistics().tasks_living
                return Counter(tasks=tasks) + open_files(process.pid) + open_files(worker.pid)

            for kind in misuse.KINDS:  # what a first request opens for good is open now
                await misuse.make_requests(target, kind, limits, 24, 24, "warm-up")
            gc.collect()  # what other tests of this process left is none of this one's
            before = await smallest(engine, counts)
            outcomes: Counter[str] = Counter()
            for kind in misuse.KINDS:
                outcomes.update(
                    await misuse.make_requests(target, kind, limits, NUM_REQUESTS, 24, "test")
                )
                # Aborts and closes are on their way: everything is back after some turns.
                with trio.move_on_after(60):
                    while engine.status.num_requests or counts() - before:
                        await engine.check()
                checked = await engine.check()  # an earlier one may have seen the last abort go out
                assert (engine.status.num_requests, counts() - before) == (0, Counter()), kind
                assert checked.fault == ""
                assert checked.num_sequences == 0, kind
                assert checked.stats.num_blocks_used == 0, kind
            assert not [what for what in outcomes if what.startswith(misuse.UNEXPECTED)], outcomes
            assert outcomes["ok"] == NUM_REQUESTS
            for moment in ("when sent", "soon", "at first token", "while decoding"):
                assert outcomes[f"left {moment}"] > 40
            assert (await engine.check()).stats.prefix_hits > 0
            assert engine.status.num_restarts == 0
            stopping.set()
    assert len(process.children(recursive=True)) == num_children
    assert not worker.is_running()


# ------------------------------------------------------------------------------ the verdict


def sample(num_requests: int, parent: float, **counts: float) -> Sample:
    return Sample(num_requests, int(parent), 10_000_000, {"tasks": 20.0, **counts})


def faults(samples: list[Sample], outcomes: dict[str, int] | None = None) -> list[str]:
    phase = {"requests": samples[-1].num_requests, "bytes_per_request": growth(samples)}
    return faults_of(samples, {"tiny": phase}, outcomes or {}, 50.0)


def test_a_leak_is_found_and_an_allocators_step_is_none() -> None:
    numbers = range(0, 20_001, 250)
    assert faults([sample(n, 5e7 + 200 * n) for n in numbers]) == [
        "parent_bytes grows by 200 bytes per request: tiny"
    ]
    assert faults([sample(n, 5e7 + (4e6 if n > 9000 else 0)) for n in numbers]) == []
    assert faults([sample(n, 5e7 + n % 3 * 1e5) for n in numbers]) == []
    assert faults([sample(n, 5e7 + 200 * n) for n in range(0, 501, 250)]) == []  # too few to tell


def test_counts_that_stay_up_and_wrong_answers_are_found() -> None:
    samples = [sample(0, 1e7), sample(9000, 1e7)]
    samples[-1].counts["tasks"] = 21.0
    found = faults(samples, {"tiny: unexpected: 500": 3, "tiny: ok": 8997})
    assert found == ["tasks: 20 before, 21 after", "3 times tiny: unexpected: 500"]


def test_memory_is_what_the_process_has_to_itself() -> None:
    from lib.proc import own_bytes

    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # no allocator that may keep it
    with mmap.mmap(-1, 30_000_000, flags=private) as held:
        held.write(bytes(os.urandom(1)) * len(held))
        with_it = own_bytes(os.getpid())
    assert with_it - own_bytes(os.getpid()) > 25_000_000
