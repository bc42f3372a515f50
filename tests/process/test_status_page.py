"""The status page under a hammering, a dying and a hostile writer; the numbers from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trioserve.ipc.status_page import (
    MAX_OPERATION_BYTES,
    Status,
    StatusReader,
    StatusWriter,
    create_page,
    explain,
    group_members,
    judge,
    process_cpu_seconds,
    process_state,
    rss_bytes,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

HAMMER = """
import sys
from trioserve.ipc.status_page import StatusWriter
writer = StatusWriter(int(sys.argv[1]))
n = 0
while True:
    n += 1
    writer.begin(str(n) * 3, float(n), n)
"""


@pytest.fixture
def page(nothing_left: None) -> Iterator[int]:
    fd = create_page()
    yield fd
    os.close(fd)


def test_a_fresh_page_reads_as_idle(page: int) -> None:
    reader = StatusReader(page)
    assert reader.read() == Status("", 0.0, 0.0, 0)
    reader.close()


def test_what_is_written_is_read(page: int) -> None:
    reader, writer = StatusReader(page), StatusWriter(page)
    writer.begin("weights", 12.5, 3)
    before = time.monotonic()
    status = reader.read()
    assert (status.operation, status.budget_s, status.step) == ("weights", 12.5, 3)
    assert 0 <= before - status.since_s < 1
    writer.step(4)
    assert reader.read().step == 4
    assert reader.read().operation == "weights"
    assert reader.read().since_s >= status.since_s
    writer.end()
    assert reader.read()[0::3] == ("", 4)
    with writer.operation("step", 1.0):
        assert reader.read()[0::3] == ("step", 4)
    assert reader.read().operation == ""
    writer.close()
    reader.close()


def test_a_long_name_is_cut_between_characters(page: int) -> None:
    reader, writer = StatusReader(page), StatusWriter(page)
    writer.begin("x" * (MAX_OPERATION_BYTES - 1) + "é", 1.0)
    assert reader.read().operation == "x" * (MAX_OPERATION_BYTES - 1)
    writer.close()
    reader.close()


def test_sd_02_a_record_left_half_written_by_a_kill_is_passed_over(page: int) -> None:
    writer, reader = StatusWriter(page), StatusReader(page)
    writer.begin("first", 1.0, 1)
    writer.begin("second", 1.0, 2)
    newest = writer._sequence & 1
    os.pwrite(page, b"\xff" * 20, newest * 128)
    assert reader.read().operation == "first"
    os.pwrite(page, b"\xff" * 20, (1 - newest) * 128)
    assert reader.read().operation == "first"  # nothing valid: what was read last
    writer.close()
    reader.close()


def test_no_torn_record_is_ever_seen(page: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(page)], pass_fds=[page])
    reader = StatusReader(page)
    try:
        started = time.monotonic()
        last, changes = 0, 0
        while changes < 200 or time.monotonic() < started + 0.5:
            assert time.monotonic() < started + 20
            status = reader.read()
            if status.step:
                assert status.operation == str(status.step) * 3
                assert status.budget_s == status.step
            assert status.step >= last
            changes += status.step > last
            last = status.step
    finally:
        writer.kill()
        writer.wait()
        reader.close()


def test_a_worker_cannot_shrink_the_page_under_its_reader(page: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(page, 0)


def test_a_closed_reader_goes_on_saying_what_it_read_last(page: int) -> None:
    reader, writer = StatusReader(page), StatusWriter(page)
    writer.begin("step", 1.0)
    reader.read()
    reader.close()
    assert reader.read().operation == "step"
    writer.close()


def test_numbers_from_proc() -> None:
    pid = os.getpid()
    before = process_cpu_seconds(pid)
    started = time.process_time()
    while time.process_time() - started < 0.1:
        pass
    after = process_cpu_seconds(pid)
    assert before is not None
    assert after is not None
    assert 0.05 <= after - before <= 1
    resident = rss_bytes(pid)
    assert resident is not None
    assert 2**20 < resident < 2**36
    assert process_state(pid) == "R"


def test_a_process_name_with_brackets_and_spaces_confuses_nobody(
    tmp_path: Path,
) -> None:
    tool = tmp_path / "a) Z 1 (b"
    tool.symlink_to("/bin/sleep")
    process = subprocess.Popen([tool, "1000"], start_new_session=True)
    assert process_state(process.pid) in ("S", "R", "D")
    assert process_cpu_seconds(process.pid) == pytest.approx(0, abs=0.5)
    assert group_members(process.pid) == [process.pid]
    process.kill()
    process.wait()
    assert group_members(process.pid) == []


def test_a_process_that_is_gone_has_no_numbers() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == "Z"
    process.wait()
    assert process_cpu_seconds(process.pid) is None
    assert process_state(process.pid) is None
    assert rss_bytes(process.pid) is None


def test_a_stopped_process_shows_as_such() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert process_state(process.pid) == "T"
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("status", "used", "now", "verdict"),
    [
        (Status("", 10, 0, 5), 0.0, 1000, "idle"),
        (Status("", 10, 0, 5), 0.9, 1000, "busy"),
        (Status("step", 10, 60, 5), 0.0, 69, "busy"),
        (Status("step", 10, 60, 5), 1.0, 69, "busy"),
        (Status("step", 10, 60, 5), 0.0, 71, "over budget"),
        (Status("step", 10, 60, 5), 1.0, 71, "over budget"),
        (Status("weights", 10, 600, 0), 1.0, 71, "busy"),
    ],
)
def test_judge(status: Status, used: float, now: float, verdict: str) -> None:
    assert judge(status, 7.0 + used, 7.0, now) == verdict


def test_explain_tells_spinning_from_waiting() -> None:
    status = Status("step", 10.0, 60.0, 5)
    spinning = explain(status, 8.0, 7.0, 1.0, 71.0)
    assert spinning.startswith("step (step 5) has taken 61.0 s of its 60 s")
    assert "100% of a processor" in spinning
    assert "waits for something" in explain(status, 7.0, 7.0, 1.0, 71.0)
