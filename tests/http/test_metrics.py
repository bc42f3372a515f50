"""What the series count, exactly, for each way a request can end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from trioserve.config.schema import Config
from trioserve.engine.api import Phase, TextDelta, Timings, Usage
from trioserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    RequestCut,
    RequestFailed,
)
from trioserve.http.metrics import FINISHES, REJECTIONS, Metrics
from trioserve.http.watch import Watch
from trioserve.sampling_params import SamplingParams

from .client import Client
from .fake_engine import FakeEngine, FakeStream
from .memory import ServedInMemory, serving_in_memory

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 20}  # a prompt of 5 tokens
STREAM = BODY | {"stream": True}
# Submitted at 100, begun 2 s later, first token at 103, last at 107.
TIMINGS = Timings(100.0, 102.0, 103.0, 107.0)
Figures = dict[str, float]

ACCEPTED: Figures = {
    "requests_accepted_total": 1,
    "prompt_tokens_total": 5,
    "request_prompt_tokens_count": 1,
    "request_prompt_tokens_sum": 5,
    "request_params_n_count": 1,
    "request_params_n_sum": 1,
    "request_params_max_tokens_count": 1,
    "request_params_max_tokens_sum": 20,
    "request_seconds_count": 1,
    "request_generation_tokens_count": 1,
    "request_queue_seconds_count": 1,
}
TAKEN_UP: Figures = ACCEPTED | {
    "request_queue_seconds_sum": 2,
    "request_prefill_seconds_count": 1,
    "request_prefill_seconds_sum": 1,
    "time_to_first_token_seconds_count": 1,
}
WHOLE: Figures = TAKEN_UP | {
    "request_decode_seconds_count": 1,
    "request_decode_seconds_sum": 4,
    "request_inference_seconds_count": 1,
    "request_inference_seconds_sum": 5,
}


async def scrape(served: ServedInMemory) -> Figures:
    """All samples but buckets and those that move by themselves; labels as in the text format."""
    client = served.connect()
    await client.send("GET", "/metrics", Connection="close")
    text = (await client.answer()).body.decode()
    figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k != "le")
            name = sample.name.removeprefix("trioserve_") + (f"[{labels}]" if labels else "")
            moving = ("process_", "tasks", "http_", "requests_open")
            if not name.startswith(moving) and not sample.name.endswith("_bucket"):
                figures[name] = sample.value
    return figures


def changes(before: Figures, after: Figures) -> Figures:
    assert before.keys() == after.keys()
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def with_timings(stream: FakeStream, timings: Timings = TIMINGS) -> None:
    stream.fixed_timings = timings


async def ask(served: ServedInMemory, body: Any) -> Client:
    client = served.connect()
    await client.send("POST", COMPLETIONS, body)
    return client


async def say_at(stream: FakeStream, *moments: tuple[float, str, str | None]) -> None:
    """Push a word at each moment, counted from now."""
    now = trio.current_time()
    for at_s, word, finish in moments:
        await trio.sleep_until(now + at_s)
        stream.say(word, finish=finish)


# ------------------------------------------------------------------------------ whole answers


async def test_a_whole_answer(autojump_clock: trio.testing.MockClock) -> None:
    async with serving_in_memory(FakeEngine(script=with_timings)) as served:
        before = await scrape(served)
        client = await ask(served, BODY)
        (stream,) = await served.engine.submitted()
        await say_at(stream, (3, "a", None), (5, "b", None), (7, "c", "stop"))
        assert (await client.answer()).status == 200
        assert changes(before, await scrape(served)) == WHOLE | {
            "choices_finished_total[reason=stop]": 1,
            "generation_tokens_total": 3,
            "request_generation_tokens_sum": 3,
            "time_to_first_token_seconds_sum": 3,
            "time_per_output_token_seconds_count": 1,
            "time_per_output_token_seconds_sum": 2,  # 4 s for the two after the first
            "request_seconds_sum": 7,
        }


async def test_a_whole_answer_of_several_choices_and_prompts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Prompts are counted once each, choices each; nobody saw tokens come one by one."""
    async with serving_in_memory(FakeEngine(script=with_timings)) as served:
        before = await scrape(served)
        client = await ask(served, BODY | {"prompt": ["hello", "you"], "n": 2})
        streams = await served.engine.submitted(4)
        await trio.sleep(3)
        for stream in streams[:3]:
            stream.say("a", "b", finish="length")
        streams[3].say("a", finish="stop")
        assert (await client.answer()).status == 200
        assert changes(before, await scrape(served)) == {
            "requests_accepted_total": 1,
            "prompt_tokens_total": 8,
            "request_prompt_tokens_count": 2,
            "request_prompt_tokens_sum": 8,
            "request_params_n_count": 1,
            "request_params_n_sum": 2,
            "request_params_max_tokens_count": 1,
            "request_params_max_tokens_sum": 20,
            "request_seconds_count": 1,
            "request_seconds_sum": 3,
            "time_to_first_token_seconds_count": 1,
            "time_to_first_token_seconds_sum": 3,
            "request_generation_tokens_count": 4,
            "request_generation_tokens_sum": 7,
            "generation_tokens_total": 7,
            "choices_finished_total[reason=length]": 3,
            "choices_finished_total[reason=stop]": 1,
            "request_queue_seconds_count": 4,
            "request_queue_seconds_sum": 8,
            "request_prefill_seconds_count": 4,
            "request_prefill_seconds_sum": 4,
            "request_decode_seconds_count": 4,
            "request_decode_seconds_sum": 16,
            "request_inference_seconds_count": 4,
            "request_inference_seconds_sum": 20,
            "time_per_output_token_seconds_count": 3,  # one token has no next
            "time_per_output_token_seconds_sum": 12,
        }


async def test_cached_tokens_are_those_of_each_prompts_first_choice(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others find what the first has computed, which nobody would call a hit."""
    usage = property(lambda stream: Usage(9, 1, [4, 8][stream.id % 2]))
    monkeypatch.setattr(FakeStream, "usage", usage)
    async with serving_in_memory() as served:
        before = await scrape(served)
        body = BODY | {"prompt": ["hello", "you"], "n": 2}
        assert (await (await ask(served, body)).answer()).status == 200
        found = changes(before, await scrape(served))
        assert found["prompt_tokens_cached_total"] == 4 + 4


# ------------------------------------------------------------------------------------ streams


async def test_a_stream(autojump_clock: trio.testing.MockClock) -> None:
    async with serving_in_memory(FakeEngine(script=with_timings)) as served:
        before = await scrape(served)
        client = await ask(served, STREAM)
        (stream,) = await served.engine.submitted()
        await say_at(stream, (3, "a", None), (4, "b", None))
        await trio.sleep(3)
        stream.push(TextDelta("cde", [7, 7, 7], finish_reason="length"))  # 1 s each
        assert (await client.answer()).status == 200
        assert changes(before, await scrape(served)) == WHOLE | {
            "choices_finished_total[reason=length]": 1,
            "generation_tokens_total": 5,
            "request_generation_tokens_sum": 5,
            "time_to_first_token_seconds_sum": 3,
            "inter_token_seconds_count": 2,
            "inter_token_seconds_sum": 2,
            "time_per_output_token_seconds_count": 1,
            "time_per_output_token_seconds_sum": 1,
            "request_seconds_sum": 7,
        }


async def test_the_choices_of_a_stream_have_their_own_pace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving_in_memory(FakeEngine(script=with_timings)) as served:
        before = await scrape(served)
        client = await ask(served, STREAM | {"n": 2})
        first, second = await served.engine.submitted(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say_at, first, (1, "a", None), (3, "b", "stop"))
            nursery.start_soon(say_at, second, (2, "a", None), (6, "b", "stop"))
        assert (await client.answer()).status == 200
        found = changes(before, await scrape(served))
        assert found["inter_token_seconds_count"] == 2
        assert found["inter_token_seconds_sum"] == 2 + 4
        assert found["time_to_first_token_seconds_count"] == 1
        assert found["time_to_first_token_seconds_sum"] == 1
        assert found["request_seconds_sum"] == 6


# --------------------------------------------------------------------- ends from the outside


async def lose_client(served: ServedInMemory, client: Client) -> None:
    await client.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()


async def fail_it(served: ServedInMemory, client: Client) -> None:
    served.engine.streams[0].fail(RequestFailed("broken"))
    await client.answer()


async def abort_it(served: ServedInMemory, client: Client) -> None:
    served.engine.streams[0].close()
    await client.answer()


async def wait_for_deadline(served: ServedInMemory, client: Client) -> None:
    await client.answer()


Ending = Callable[[ServedInMemory, Client], Awaitable[None]]
ENDINGS: dict[str, Ending] = {
    "gone": lose_client,
    "error": fail_it,
    "aborted": abort_it,
    "timeout": wait_for_deadline,
}


@pytest.mark.parametrize("reason", ENDINGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_ended_while_decoding(
    autojump_clock: trio.testing.MockClock, reason: str, stream: bool
) -> None:
    """Decode time, inference time and time per token are of whole answers only."""
    async with serving_in_memory(FakeEngine(script=with_timings)) as served:
        before = await scrape(served)
        client = await ask(served, BODY | {"stream": stream, "timeout_s": 8})
        (fake,) = await served.engine.submitted()
        await say_at(fake, (3, "a", None), (5, "b", None))
        await ENDINGS[reason](served, client)
        paced = {"inter_token_seconds_count": 1, "inter_token_seconds_sum": 2}
        assert changes(before, await scrape(served)) == TAKEN_UP | (paced if stream else {}) | {
            f"choices_finished_total[reason={reason}]": 1,
            "generation_tokens_total": 2,
            "request_generation_tokens_sum": 2,
            "time_to_first_token_seconds_sum": 3,
            "request_seconds_sum": 8 if reason == "timeout" else 5,
        }


@pytest.mark.parametrize("reason", ENDINGS)
async def test_ended_while_waiting(autojump_clock: trio.testing.MockClock, reason: str) -> None:
    """All the time of one that was never begun is waiting."""
    never = Timings(100.0, None, None, None)
    engine = FakeEngine(script=lambda stream: with_timings(stream, never))
    async with serving_in_memory(engine) as served:
        before = await scrape(served)
        client = await ask(served, BODY | {"timeout_s": 5})
        await served.engine.submitted()
        await trio.sleep(4)
        await ENDINGS[reason](served, client)
        waited = 5 if reason == "timeout" else 4
        assert changes(before, await scrape(served)) == ACCEPTED | {
            f"choices_finished_total[reason={reason}]": 1,
            "request_queue_seconds_sum": waited,
            "request_seconds_sum": waited,
        }


async def test_ended_while_prefilling(autojump_clock: trio.testing.MockClock) -> None:
    begun = Timings(100.0, 102.0, None, None)
    engine = FakeEngine(script=lambda stream: with_timings(stream, begun))
    async with serving_in_memory(engine) as served:
        before = await scrape(served)
        client = await ask(served, STREAM)
        await served.engine.submitted()
        await trio.sleep(4)
        await fail_it(served, client)
        assert changes(before, await scrape(served)) == ACCEPTED | {
            "choices_finished_total[reason=error]": 1,
            "request_queue_seconds_sum": 2,
            "request_seconds_sum": 4,
        }


async def test_one_choice_of_two_was_whole_when_the_other_failed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving_in_memory(FakeEngine(script=with_timings)) as served:
        before = await scrape(served)
        client = await ask(served, STREAM | {"n": 2})
        first, second = await served.engine.submitted(2)
        await say_at(first, (1, "a", "stop"))
        await trio.testing.wait_all_tasks_blocked()
        second.fail(RequestFailed("broken"))
        await client.answer()
        found = changes(before, await scrape(served))
        assert found["choices_finished_total[reason=stop]"] == 1
        assert found["choices_finished_total[reason=error]"] == 1
        assert found["request_decode_seconds_count"] == 1
        assert found["request_queue_seconds_count"] == 2
        assert found["request_seconds_count"] == 1


async def test_cut_at_the_end_of_a_drain(autojump_clock: trio.testing.MockClock) -> None:
    """Nobody can scrape a server that is gone, so this looks at what it would have said."""
    engine = FakeEngine(script=None)
    metrics = Metrics(engine, [], Config())
    stream = engine.submit([1, 2, 3], SamplingParams(max_tokens=20))
    with_timings(stream)
    watch = Watch(metrics, 1, 3, streams=[stream], samplings=[stream.sampling], streamed=True)
    watch.delta(TextDelta("a", [7]))
    with pytest.raises(RequestCut):
        with watch.failures():
            raise RequestCut("shutting down")
    watch.end()
    counts = {f.name: f for f in metrics.families()}
    ended = {s.labels["reason"]: s.value for s in counts["trioserve_choices_finished"].samples}
    assert ended == dict.fromkeys(FINISHES, 0) | {"cut": 1}
    assert (metrics.queue.count, metrics.prefill.count, metrics.decode.count) == (1, 1, 0)


# --------------------------------------------------------------------------------- rejections


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("queue_full", QueueFull("full")),
        ("context_length", ContextLengthExceeded("long")),
        ("invalid", InvalidRequest("wrong")),
        ("error", RequestFailed("broken")),
    ],
)
async def test_refused_by_the_engine(
    autojump_clock: trio.testing.MockClock, reason: str, error: Any
) -> None:
    async with serving_in_memory() as served:
        served.engine.refuse = error
        before = await scrape(served)
        assert (await (await ask(served, BODY)).answer()).status == error.status
        found = changes(before, await scrape(served))
        assert found == {f"requests_rejected_total[reason={reason}]": 1}


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("model_not_found", BODY | {"model": "other"}),
        ("context_length", {"prompt": "x" * 3000}),
        ("invalid", {"prompt": 1.5}),
        ("invalid", b"no json"),
        ("invalid", {"prompt": "x" * 20_000}),  # 413
    ],
)
async def test_refused_for_its_body(
    autojump_clock: trio.testing.MockClock, reason: str, body: Any
) -> None:
    async with serving_in_memory(max_body_bytes=10_000) as served:
        before = await scrape(served)
        assert (await (await ask(served, body)).answer()).status >= 400
        found = changes(before, await scrape(served))
        assert found == {f"requests_rejected_total[reason={reason}]": 1}


async def test_refused_while_loading(autojump_clock: trio.testing.MockClock) -> None:
    async with serving_in_memory(FakeEngine(phase=Phase.LOADING)) as served:
        before = await scrape(served)
        assert (await (await ask(served, BODY)).answer()).status == 503
        found = changes(before, await scrape(served))
        assert found == {"requests_rejected_total[reason=not_ready]": 1}


@pytest.mark.parametrize("leave", [False, True])
async def test_ended_before_submission(autojump_clock: trio.testing.MockClock, leave: bool) -> None:
    engine = FakeEngine()
    engine.encoding = trio.Event()
    async with serving_in_memory(engine) as served:
        before = await scrape(served)
        client = await ask(served, BODY | {"timeout_s": 5})
        await engine.encoding.wait()
        if leave:
            await lose_client(served, client)
        else:
            assert (await client.answer()).status == 504
        found = changes(before, await scrape(served))
        assert found == {f"requests_rejected_total[reason={'gone' if leave else 'timeout'}]": 1}


async def test_a_failure_of_ours_is_counted_as_one(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_in_memory() as served:
        served.engine.refuse = ZeroDivisionError()  # type: ignore[assignment]
        before = await scrape(served)
        assert (await (await ask(served, BODY)).answer()).status == 500
        found = changes(before, await scrape(served))
        assert found == {"requests_rejected_total[reason=error]": 1}


async def test_every_generation_request_is_accepted_or_rejected_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving_in_memory() as served:
        before = await scrape(served)
        for body in (BODY, STREAM, {"prompt": []}, b"{", BODY | {"model": "x"}, STREAM | {"n": 3}):
            await (await ask(served, body)).answer()
        found = changes(before, await scrape(served))
        rejected = sum(v for k, v in found.items() if k.startswith("requests_rejected"))
        assert (found["requests_accepted_total"], rejected) == (3, 3)
        assert found["choices_finished_total[reason=stop]"] == 5


async def test_labels_that_may_come_are_there_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving_in_memory(FakeEngine(phase=Phase.LOADING)) as served:
        figures = await scrape(served)
        for name, values in (
            ("choices_finished_total[reason=", FINISHES),
            ("requests_rejected_total[reason=", REJECTIONS),
            ("engine_phase[phase=", tuple(Phase)),
        ):
            found = {k for k in figures if k.startswith(name)}
            assert found == {f"{name}{value}]" for value in values}
