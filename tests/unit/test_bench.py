"""The arithmetic, the readers and the client of bench/."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
try:
    from lib import answers, client, output, proc, stats
finally:
    sys.path.remove(str(BENCH))

SIMULATED: dict[str, dict[str, Any]] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
    "device": {"kind": "simulated"},
}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


# ------------------------------------------------------------------------------- arithmetic


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for index in (1, 50, 90, 99):
        found = stats.percentile(values, index / 100)
        assert found == pytest.approx(cuts[index - 1], rel=1e-9, abs=1e-6)


def test_percentiles_at_the_edges() -> None:
    assert stats.percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert stats.percentile([3.0, 1.0, 2.0], 1) == 3.0
    assert stats.percentile([7.0], 0.99) == 7.0
    for values, share in (([], 0.5), ([1.0], 1.1)):
        with pytest.raises(ValueError, match="no percentile"):
            stats.percentile(values, share)


def test_a_summary_is_in_milliseconds() -> None:
    summary = stats.summarize_ms(index / 1000 for index in range(1, 102))
    assert summary == {"mean": 51.0, "median": 51.0, "p90": 91.0, "p99": 100.0, "count": 101}
    assert stats.summarize_ms([]) is None


def test_medians_go_by_number_and_skip_what_is_none() -> None:
    runs = [
        {"a": 1, "b": {"c": 5.0, "by": "usage"}, "d": None, "ok": True},
        {"a": 3, "b": {"c": 1.0, "by": "usage"}, "d": None, "ok": True},
        {"a": 2, "b": None, "d": None, "e": {}, "ok": True},
    ]
    assert stats.median_of(runs) == {"a": 2, "b": {"c": 3.0}}
    assert stats.median_of([]) == {}


def test_a_comparison_has_what_both_have() -> None:
    before = {"x": {"up": 10, "gone": 1}, "zero": 0, "text": "a"}
    now = {"x": {"up": 15, "new": 1}, "zero": 2, "text": "b"}
    assert stats.compare(before, now) == [("x.up", 10, 15, "+50.0 %"), ("zero", 0, 2, "-")]


# ------------------------------------------------------------------------------- events


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@given(data=st.data())
def test_events_do_not_depend_on_where_bytes_are_cut(end: bytes, data: st.DataObject) -> None:
    lines = [
        b": hello",
        b"data: one",
        b"",
        b"event: x",
        b"data:two",
        b"data:  3",
        b"",
        b"",
        b"id: 7",
    ]
    stream = end.join([*lines, b"data", b"", b"data: not finished"])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = answers.SseParser()
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[start:stop])
    assert found == [b"one", b"two\n 3", b""]


def test_an_event_comes_with_the_piece_that_completes_it() -> None:
    parser = answers.SseParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\ndata: 2") == [b"1"]
    assert parser.feed(b"\n\n") == [b"2"]


# ------------------------------------------------------------------------------- answers


def piece(*events: object) -> bytes:
    """Events in one chunk of an HTTP body."""
    data = b"".join(
        b"data: %b\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode())
        for event in events
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(words: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, "finish_reason": finish_reason}], "usage": None}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


def exchanged(*pieces: tuple[float, bytes], sent_at: float = 10.0) -> answers.Exchange:
    return answers.Exchange("POST /v1/completions", sent_at=sent_at, pieces=list(pieces))


WHOLE = (
    (10.5, HEAD),
    (11.0, piece(text("one"))),
    (11.5, piece(text("two"), text("three"))),
    (13.0, piece(text("four five"), text("", "length"))),
    (13.25, piece(usage(128, 6, 32), b"[DONE]") + LAST),
)


def test_the_times_and_counts_of_an_answer() -> None:
    outcome = answers.read_answer(exchanged(*WHOLE))
    assert outcome.failure is None
    assert outcome.ttft_s == 1.0
    assert outcome.gaps_s == [0.5, 0.0, 1.5]
    assert outcome.tpot_s == 2.0 / 5  # by usage: six tokens in four chunks
    assert outcome.e2e_s == 3.25
    assert outcome.finish_reason == "length"
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (128, 32, 6)


def test_without_usage_chunks_are_counted() -> None:
    outcome = answers.read_answer(exchanged(*WHOLE[:4], (14.0, LAST)))
    assert outcome.failure is None
    assert outcome.output_tokens == 4
    assert answers.summarize([outcome])["tokens_counted_by"] == "chunks"


def test_chat_counts_what_is_said_not_the_role() -> None:
    def said(**delta: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    outcome = answers.read_answer(
        exchanged(
            (10.1, HEAD + piece(said(role="assistant", content=""))),
            (10.5, piece(said(content="hi"))),
            (10.75, piece(said(reasoning_content="hm"), end) + LAST),
        )
    )
    assert outcome.failure is None
    assert outcome.chunk_times == [10.5, 10.75]


def test_an_answer_that_shows_no_text_is_known_by_its_end() -> None:
    outcome = answers.read_answer(exchanged((12.0, HEAD + piece(text("", "length")) + LAST)))
    assert (outcome.failure, outcome.ttft_s, outcome.tpot_s) == (None, 2.0, None)


ERROR = {"error": {"message": "…", "type": "server_error", "code": None}}
FULL = json.dumps({"error": {"message": "…", "type": "overloaded", "code": "queue_full"}}).encode()


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        (
            [b"HTTP/1.1 429 Slow\r\nContent-Length: %d\r\n\r\n" % len(FULL), FULL],
            "HTTP 429 queue_full",
        ),
        ([b"HTTP/1.1 502 Bad\r\nConnection: close\r\n\r\n", b"<html>", b""], "HTTP 502"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"],
            "not an event stream: no content type",
        ),
        ([], "no HTTP response"),
        ([b""], "no HTTP response"),
        ([b"SSH-2.0\r\n\r\n", b""], "no HTTP response"),
        ([HEAD, piece(text("one")), b""], "cut short"),
        ([HEAD + LAST], "no finish_reason"),
        ([HEAD + LAST + piece(text("one", "length")) + LAST, b""], "broken HTTP"),
        ([HEAD, b"zz\r\n", b""], "broken HTTP"),
        ([HEAD, piece(text("one"), b"[DONE]") + LAST], "no finish_reason"),
        ([HEAD, piece(text("one"), ERROR) + LAST], "error event server_error"),
        ([HEAD, piece(text("one"), b"{oops") + LAST], "an event that is not JSON"),
    ],
)
def test_failures_have_names(pieces: list[bytes], failure: str) -> None:
    timed = [(10.0 + index, data) for index, data in enumerate(pieces)]
    assert answers.read_answer(exchanged(*timed)).failure == failure


def test_a_failure_of_the_client_is_told_before_what_follows_from_it() -> None:
    exchange = exchanged(*WHOLE[:2])
    exchange.failure = "timeout"
    assert answers.read_answer(exchange).failure == "timeout"


def test_the_summary_of_a_run() -> None:
    later = exchanged(*[(at + 4, data) for at, data in WHOLE], sent_at=14.0)
    cut = exchanged(*WHOLE[:2], (22.0, b": bye\n"), (22.5, b""), sent_at=9.0)
    outcomes = [answers.read_answer(exchange) for exchange in (exchanged(*WHOLE), later, cut)]
    summary = answers.summarize(outcomes)
    for name in ("ttft_ms", "e2e_ms"):
        assert summary.pop(name)["count"] == 2
    assert summary.pop("itl_ms") == {
        "mean": 666.667,
        "median": 500.0,
        "p90": 1500.0,
        "p99": 1500.0,
        "count": 6,
    }
    assert summary.pop("tpot_ms")["median"] == 400.0
    assert summary == {
        "requests": 3,
        "completed": 2,
        "failures": {"cut short": 1},
        "finish_reasons": {"length": 2},
        "tokens_counted_by": "usage",
        "prompt_tokens": 256,
        "cached_tokens": 64,
        "output_tokens": 12,
        "tokens_per_chunk": 1.5,
        "duration_s": 13.0,  # from the first send at 9 to the last byte at 22
        "output_tokens_per_s": round(12 / 13, 2),
        "requests_per_s": round(2 / 13, 3),
    }


def test_the_summary_when_nothing_came() -> None:
    summary = answers.summarize([answers.read_answer(exchanged())])
    assert summary["failures"] == {"no HTTP response": 1}
    assert summary["output_tokens_per_s"] is None
    assert summary["ttft_ms"] is None


# ------------------------------------------------------------------------------- the client


class Peer:
    """A server that answers every request with ``pieces`` once ``gate`` is open."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.gate = trio.Event()
        self.num_open = self.most_open = 0
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, stream: trio.SocketStream) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                data += await stream.receive_some()
            self.bodies.append(json.loads(data.partition(b"\r\n\r\n")[2]))
            await self.gate.wait()
            for data in self.pieces:
                await stream.send_all(data)
            self.num_open -= 1


@asynccontextmanager
async def serving(peer: Peer) -> AsyncIterator[client.Target]:
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, peer.handle, 0, host="127.0.0.1")
        listeners = await nursery.start(serve)
        port = listeners[0].socket.getsockname()[1]
        yield client.Target.of(f"http://127.0.0.1:{port}/base/v1/")
        nursery.cancel_scope.cancel()


def workload(**changes: Any) -> client.Workload:
    fields = {"model": "m", "kind": "ids", "size": 5, "max_tokens": 3, "vocabulary": range(9, 99)}
    return client.Workload(**{**fields, "extra": {}, **changes})


async def test_a_closed_loop_has_as_many_requests_open_as_it_was_told() -> None:
    peer = Peer(*(data for _, data in WHOLE))
    async with serving(peer) as target:
        assert target.prefix == "/base"

        async def open_gate() -> None:
            await trio.testing.wait_all_tasks_blocked(0.05)
            peer.gate.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_gate)
            requests = list(workload().requests(target, "s", 7))
            exchanges = await client.closed_loop(target, requests, 3, 5.0)
    assert peer.most_open == 3
    assert [answers.read_answer(exchange).failure for exchange in exchanges] == [None] * 7
    prompts = [tuple(body["prompt"]) for body in peer.bodies]
    assert len(set(prompts)) == 7
    assert {len(prompt) for prompt in prompts} == {5}


async def test_silence_is_a_timeout(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(Peer()) as target:
        exchange = await client.exchange(target, workload().request(target, "s"), 30.0)
    assert exchange.failure == "timeout"


async def test_nobody_there() -> None:
    async with serving(Peer()) as target:
        pass
    exchange = await client.exchange(target, workload().request(target, "s"), 5.0)
    assert answers.read_answer(exchange).failure == "connect: ConnectionRefusedError"
    with pytest.raises(client.ServerError, match="/v1/models gives no answer"):
        await client.describe_server(target, wait_s=0)


async def test_a_server_that_takes_nothing_is_told_with_its_reasons() -> None:
    peer = Peer(b"HTTP/1.1 400 No\r\nConnection: close\r\n\r\n" + FULL)
    peer.gate.set()
    async with serving(peer) as target:
        with pytest.raises(
            client.ServerError, match="as ids: HTTP 400 queue_full; prompts as text"
        ):
            await client.settle(target, workload(), ["ids", "text"], "s", 5.0)


async def test_words_are_fitted_to_tokens() -> None:
    counted: list[int] = []

    async def handle(stream: trio.SocketStream) -> None:
        data = b""
        while not data.endswith(b"}"):
            data += await stream.receive_some()
        body = json.loads(data.partition(b"\r\n\r\n")[2])
        async with stream:
            if "messages" not in body:
                await stream.send_all(b"HTTP/1.1 404 No\r\nConnection: close\r\n\r\n")
                return
            counted.append(2 * len(body["messages"][0]["content"].split()) + 31)
            await stream.send_all(HEAD + piece(text("a", "stop"), usage(counted[-1], 1)) + LAST)

    peer = Peer()
    peer.handle = handle  # type: ignore[method-assign]
    async with serving(peer) as target:
        chosen, refused = await client.settle(
            target, workload(size=501), ["ids", "text", "chat"], "s", 5.0
        )
    assert (chosen.kind, counted[-1]) == ("chat", 501)
    assert refused == ["prompts as ids: HTTP 404", "prompts as text: HTTP 404"]


def test_extra_fields_are_added_and_taken_out() -> None:
    body = workload(extra={"ignore_eos": None, "min_tokens": 3}).body("s")
    assert body["min_tokens"] == 3
    assert "ignore_eos" not in body
    assert body == workload(extra={"ignore_eos": None, "min_tokens": 3}).body("s")


def test_arrivals_have_the_rate_asked_for() -> None:
    offsets = client.poisson_offsets(5.0, 4000, "s")
    assert offsets == sorted(offsets)
    assert 4000 / offsets[-1] == pytest.approx(5.0, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(offsets)]
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # as the mean: exponential


def test_only_http_urls() -> None:
    with pytest.raises(client.ServerError, match="expected http://HOST:PORT"):
        client.Target.of("https://127.0.0.1")


# ------------------------------------------------------------------------------- output


def test_a_baseline_that_is_none_is_found_before_measuring(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    args = argparse.Namespace(baseline=str(file))
    for content in ("{", "[]", '{"median": 3}', "{}"):
        file.write_text(content)
        with pytest.raises(SystemExit, match="not a result"):
            output.read_baseline(args)
    assert output.read_baseline(argparse.Namespace(baseline=None)) is None


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"median": {"speed": 1234.5678, "ttft_ms": {"mean": 2.0, "p90": 3.0}}}
    args = argparse.Namespace(json=str(tmp_path / "new.json"), baseline=None)
    output.write_result(result, args, None, ["failed 1 times: timeout"])
    assert capsys.readouterr().out.splitlines() == [
        "speed    1,234.57",
        "ttft_ms    mean 2  p90 3",
        "failed 1 times: timeout",
    ]
    args = argparse.Namespace(json="-", baseline=str(tmp_path / "new.json"))
    output.write_result({"median": {"speed": 2469.1356}}, args, output.read_baseline(args))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"median": {"speed": 2469.1356}}
    assert captured.err.split() == [
        "before",
        "now",
        "change",
        "speed",
        "1,234.57",
        "2,469.14",
        "+100.0",
        "%",
    ]


def test_memory_and_time_of_a_tree_of_processes() -> None:
    script = "import os, subprocess, sys; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        try:
            while "sleep" not in (found := proc.memory_of_tree(process.pid)):
                assert process.poll() is None
            assert set(found) == {"parent", "sleep", "total"}
            rss = found["parent"]["rss_mib"] + found["sleep"]["rss_mib"]
            assert found["total"]["rss_mib"] == pytest.approx(rss, abs=0.05)
            assert found["parent"]["pss_mib"] <= found["parent"]["rss_mib"]
        finally:
            os.killpg(process.pid, 9)
    own = proc.memory_of(os.getpid())
    assert 1 < own["rss_anon_mib"] < own["rss_mib"] <= own["peak_rss_mib"]
    assert proc.cpu_s_of_tree(os.getpid()) > 0
