"""What an operator sees of start-up, and of rates."""

from __future__ import annotations

import io
import logging

import pytest

from trioserve.engine.api import EngineStatus, Phase, StageStatus
from trioserve.engine.startup import StageTree
from trioserve.ipc.messages import ReadyInfo, Stage, StepStats
from trioserve.logs import JsonFormatter, TextFormatter
from trioserve.progress import LineView, LiveView, draw_stages, format_bytes, summary
from trioserve.rates import describe_rates


def make_status(phase: Phase, *stages: StageStatus, incarnation: int = 1) -> EngineStatus:
    info = ReadyInfo(
        "llama", 134_515_008, 271_000_000, "fp16", "float32", "cpu", 2, "numba", 2048, 49152, 16,
        512, 377_487_360, 1,
    )  # fmt: skip
    return EngineStatus(phase, incarnation, list(stages), None, "tiny", info, None, 0, 3.25, 3.25)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_pf_05_a_quick_stage_gets_one_line_and_a_slow_one_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    view = LineView(lambda: now)
    quick = StageStatus("device", "done", 1.0, "2 threads", None, 0.01)
    slow = StageStatus("weights", "running", 0.0)
    view.show(make_status(Phase.LOADING, quick, slow))
    view.show(make_status(Phase.LOADING, quick, slow))
    assert messages(caplog) == ["device: 0.01 s, 2 threads"]
    for i in range(1, 12):
        now = i * 0.5
        slow.fraction, slow.num_bytes = i / 20, i * 1_000_000
        view.show(make_status(Phase.LOADING, quick, slow))
    slow.state, slow.seconds = "done", 6.0
    view.show(make_status(Phase.LOADING, quick, slow))
    lines = messages(caplog)[1:]
    assert lines[0] == "weights: 5%, 976.6 KiB"
    assert lines[-1] == "weights: 6.00 s, 10.5 MiB"
    assert len(lines) == 4  # at 0.5, 2.5 and 4.5 s, and the end


def test_a_second_incarnation_speaks_of_its_own_stages_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    view = LineView(lambda: 0.0)
    once = StageStatus("inspect", "done", seconds=0.1)
    again = StageStatus("weights", "done", seconds=1.0)
    view.show(make_status(Phase.LOADING, once, again))
    view.show(make_status(Phase.RESTARTING, once, again, incarnation=2))
    names = [line.split(":")[0] for line in messages(caplog)]
    assert names == ["inspect", "weights", "weights"]


def test_the_live_view_draws_every_stage_and_leaves_nothing_behind() -> None:
    from rich.console import Console

    screen = io.StringIO()
    view = LiveView(Console(file=screen, force_terminal=True, width=100))
    view.show(
        make_status(
            Phase.LOADING,
            StageStatus("inspect", "done", seconds=0.1),
            StageStatus("weights", "running", 0.5, "unpacking", 5_000_000),
            StageStatus("profile"),
        )
    )
    drawn = screen.getvalue()
    for text in ("inspect", "weights", "unpacking", "4.8 MiB", "profile"):
        assert text in drawn
    view.show(make_status(Phase.READY))
    view.close()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back


def test_a_running_stage_without_a_fraction_says_for_how_long_it_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    tree = StageTree(clock=lambda: now)
    tree.apply(Stage("profile", "start"))
    now = 103.5
    running = next(stage for stage in tree.snapshot() if stage.name == "profile")
    assert (running.state, running.seconds) == ("running", 3.5)
    assert "3.50 s" in drawn_lines(80, running)[0]
    caplog.set_level(logging.INFO)
    view = LineView(lambda: now)
    view.show(make_status(Phase.LOADING, *tree.snapshot()))
    now = 104.5
    view.show(make_status(Phase.LOADING, *tree.snapshot()))
    assert messages(caplog) == ["profile: 4 s so far"]
    tree.fail()
    now = 200.0
    [failed] = [stage for stage in tree.snapshot() if stage.name == "profile"]
    assert (failed.state, failed.seconds) == ("failed", 4.5)


def test_of_stages_that_run_side_by_side_only_the_one_at_fault_has_failed() -> None:
    tree = StageTree()
    tree.apply(Stage("fetch", "start"))
    tree.apply(Stage("spawn", "start"))
    tree.apply(Stage("spawn", "end", seconds=0.1))
    tree.apply(Stage("python", "start"))
    tree.fail("fetch")
    states = {stage.name: stage.state for stage in tree.snapshot()}
    assert (states["fetch"], states["spawn"], states["python"]) == ("failed", "done", "pending")
    assert tree.current == "fetch"


def test_a_stage_that_failed_after_its_end_is_shown_as_failed() -> None:
    tree = StageTree()
    tree.apply(Stage("inspect", "start"))
    tree.apply(Stage("inspect", "end", seconds=0.1))
    tree.fail("inspect")
    assert tree.current == "inspect"


def test_an_ended_stage_has_the_workers_own_time() -> None:
    tree = StageTree()
    tree.apply(Stage("profile", "start"))
    tree.apply(Stage("profile", "end", seconds=0.25))
    [ended] = [stage for stage in tree.snapshot() if stage.name == "profile"]
    assert (ended.state, ended.seconds) == ("done", 0.25)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_stage_is_one_line_however_long_its_detail(width: int) -> None:
    stages = [
        StageStatus("resolve", "done", None, "a/path/of/many/parts/" * 9, None, 0.01),
        StageStatus("fetch", "running", 0.5, "one two three four " * 9, 93_000_000, 12.0),
        StageStatus("distributed", "failed", None, "x" * 300, 93_000_000, 12.0),
        StageStatus("ready"),
    ]
    lines = drawn_lines(width, *stages)
    assert len(lines) == len(stages)
    assert max(map(len, lines)) <= width
    for stage, line in zip(stages, lines, strict=True):
        assert stage.name in line
        assert not stage.detail or stage.detail[:2] in line
    assert "12.00 s" in lines[1]
    assert "88.7 MiB" in lines[1]


def drawn_lines(width: int, *stages: StageStatus) -> list[str]:
    from rich.console import Console

    screen = io.StringIO()
    Console(file=screen, width=width).print(draw_stages(list(stages)))
    return screen.getvalue().splitlines()


def test_a_restart_does_not_rub_out_what_stands_above() -> None:
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    view = LiveView(console)
    stages = [StageStatus(f"stage-{i}") for i in range(12)]
    view.show(make_status(Phase.LOADING, *stages))
    view.close()
    console.print("the cause of the death")
    after = len(screen.getvalue())
    view.show(make_status(Phase.RESTARTING, *stages, incarnation=2))
    drawn = screen.getvalue()[after:]
    assert "stage-11" in drawn
    assert "\x1b[1A" not in drawn.split("stage-0")[0]  # the first frame moves up nowhere
    view.close()


def test_summary_of_a_restart_counts_from_the_restart() -> None:
    once, again = StageStatus("fetch", "done", seconds=9.0), StageStatus("weights", "done")
    again.seconds = 1.5
    text = "\n".join(summary(make_status(Phase.READY, once, again, incarnation=2), ["x"]))
    assert "ready after 1.50 s on x, incarnation 2" in text
    assert "fetch" not in text


def test_summary_has_what_operators_ask_for() -> None:
    stage = StageStatus("weights", "done", seconds=1.234)
    text = "\n".join(summary(make_status(Phase.READY, stage), ["http://127.0.0.1:8000"]))
    for part in (
        "134.5 M parameters", "fp16", "258.4 MiB", "8192 tokens", "4.0 requests", "2048",
        "weights 1.23", "3.25 s", "http://127.0.0.1:8000",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (93 << 20, "93.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def make_stats(prompt: int, output: int) -> StepStats:
    return StepStats(3, 1, 32, 64, 100, 50, 0, prompt, output, 0.1)


def test_rates_are_differences_and_idle_says_nothing() -> None:
    line = describe_rates(make_stats(100, 10), make_stats(300, 60), 10.0)
    assert line is not None
    assert "prompt 20.0 tokens/s, output 5.0 tokens/s, running 3, waiting 1" in line
    assert "KV cache 50%" in line
    assert describe_rates(make_stats(300, 60), make_stats(300, 60), 10.0) is None


def test_totals_of_a_new_incarnation_count_from_zero() -> None:
    line = describe_rates(make_stats(9000, 900), make_stats(100, 50), 10.0)
    assert line is not None
    assert "output 5.0 tokens/s" in line


def record(message: str, *args: object, name: str = "trioserve") -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "f", 1, message, args, None)


def test_json_lines_carry_extra_fields_and_cannot_be_forged() -> None:
    import orjson

    entry = record("a %s", 'b"\n{"level":"error"}')
    entry.stage = "weights"
    line = JsonFormatter().format(entry)
    assert "\n" not in line
    assert orjson.loads(line)["stage"] == "weights"


def test_a_worker_line_cannot_move_the_cursor() -> None:
    text = TextFormatter().format(record("%s", "x\x1b[2Jy", name="trioserve.worker"))
    assert "\x1b" not in text
    assert text.endswith("worker: x\\x1b[2Jy")
