"""Compiling, caching, the team, and what happens where numba does not work."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys

import numba
import numpy as np
import pytest

from trioserve.errors import ModelError
from trioserve.kernels.cpu import digits, simd, words
from trioserve.kernels.cpu.runtime import Team, next_unit, team_barrier, thread_index
from trioserve.models.attention import KVCacheSpec, make_backend

SPEC = KVCacheSpec(num_heads=2, num_kv_heads=1, head_dim=8)


class Params(ctypes.Structure):
    _fields_ = [("seen", ctypes.c_int64), ("counter", ctypes.c_int64), ("total", ctypes.c_int64)]


def count_off(params):
    """Each thread marks itself; after the barrier all see all; units are given out once."""
    p = numba.carray(params, 1)[0]
    seen = numba.carray(simd.int64s(p.seen), p.total + 64)
    seen[thread_index()] = 1
    team_barrier()
    seen[8 + thread_index()] = seen[0] + seen[1]
    while True:
        unit = next_unit(p.counter)
        if unit >= p.total:
            break
        seen[64 + unit] += 1


def test_a_team_divides_its_work():
    kernel = Team(2, None).compile(count_off, Params)
    seen, counter = np.zeros(64 + 1000, np.int64), np.zeros(1, np.int64)
    kernel(Params(seen.ctypes.data, counter.ctypes.data, 1000))
    assert seen[:2].tolist() == [1, 1]
    assert seen[8:10].tolist() == [2, 2]
    assert (seen[64:] == 1).all()


def test_one_thread_is_the_caller():
    kernel = Team(1, None).compile(count_off, Params)
    seen, counter = np.zeros(64 + 10, np.int64), np.zeros(1, np.int64)
    kernel(Params(seen.ctypes.data, counter.ctypes.data, 10))
    assert seen[:2].tolist() == [1, 0]
    assert (seen[64:] == 1).all()


def test_exact_results_do_without_units_whose_digits_are_others():
    team = Team(1, None, exact=True)
    assert (team.tiles, team.byte_products) == (None, False)
    assert "byte products" not in team.describe()


def test_words_are_for_exact_results_too():
    assert Team(1, None, exact=True).word_products == Team(1, None).word_products == words.PRESENT
    assert ("word products" in Team(1, None).describe()) == words.PRESENT
    assert not Team(1, None, word_products=False).word_products


def test_the_log_tells_of_byte_products_where_they_are_used():
    team = Team(1, None)
    assert ("byte products" in team.describe()) == team.byte_products == digits.PRESENT
    assert not Team(1, None, byte_products=False).byte_products


def test_a_damaged_cache_is_passed_over(tmp_path, caplog):
    first = Team(1, tmp_path)
    assert first.compile(count_off, Params) is first.compile(count_off, Params)
    assert (first.num_compiled, first.num_loaded) == (1, 0)
    [damaged] = tmp_path.glob("*.kernel")
    damaged.write_bytes(damaged.read_bytes()[:-40])
    second, third = Team(1, tmp_path), Team(1, tmp_path)
    kernel = second.compile(count_off, Params)
    assert (second.num_compiled, second.num_loaded) == (1, 0)
    assert "damaged" in caplog.text
    seen, counter = np.zeros(64 + 10, np.int64), np.zeros(1, np.int64)
    kernel(Params(seen.ctypes.data, counter.ctypes.data, 10))
    assert (seen[64:] == 1).all()
    third.compile(count_off, Params)
    assert (third.num_compiled, third.num_loaded) == (0, 1)


def test_a_kernel_that_needs_numba_is_refused():
    def allocates(params):
        p = numba.carray(params, 1)[0]
        p.seen = np.zeros(p.total)[0]

    with pytest.raises(RuntimeError, match=r"kernel allocates calls .*NRT_"):
        Team(1, None).compile(allocates, Params)


START = """
import ctypes, sys
import numba
from trioserve.kernels.cpu import runtime, simd

class Params(ctypes.Structure):
    _fields_ = [("out", ctypes.c_int64)]

def kernel(params):
    p = numba.carray(params, 1)[0]
    runtime.team_barrier()
    numba.carray(simd.int64s(p.out), 1)[0] = 7 + runtime.thread_index()

team = runtime.Team(2, runtime.cache_directory())
print("ready", flush=True)
sys.stdin.readline()
out = ctypes.c_int64()
team.compile(kernel, Params)(Params(ctypes.addressof(out)))
print(team.threads, team.num_compiled, team.num_loaded, out.value, flush=True)
"""


def test_servers_starting_together_share_a_cache(tmp_path):
    """Also: without torch there is no OpenMP, and the kernels run on the caller."""
    script = tmp_path / "start.py"
    script.write_text(START)

    def start():
        return subprocess.Popen(
            # -P: the cache is a directory `trioserve` beside the script, and no package.
            [sys.executable, "-P", str(script)],
            env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    together = [start(), start()]
    for process in together:
        assert process.stdout.readline() == "ready\n"
    results = [process.communicate("go\n", timeout=100)[0] for process in together]
    assert all(result in ("1 1 0 7\n", "1 0 1 7\n") for result in results), results
    assert start().communicate("go\n", timeout=100)[0] == "ready\n1 0 1 7\n"


def test_without_numba_torch_takes_over(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "trioserve.kernels.cpu.paged_attention", None)
    with caplog.at_level(logging.WARNING):
        assert make_backend("auto", [SPEC], 16, 1).name == "torch"
    assert "torch takes over" in caplog.text
    with pytest.raises(ModelError, match=r"\[kernels\] attention = numba does not work here"):
        make_backend("numba", [SPEC], 16, 1)


def test_a_compiler_that_fails_is_no_crash(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*args, **kwargs):
        raise RuntimeError("LLVM says no\nat length")

    monkeypatch.setattr(numba, "cfunc", fail)
    assert make_backend("auto", [SPEC], 16, 1).name == "torch"
    assert "LLVM says no" in caplog.text
    with pytest.raises(ModelError, match="RuntimeError: LLVM says no"):
        make_backend("numba", [SPEC], 16, 1)
