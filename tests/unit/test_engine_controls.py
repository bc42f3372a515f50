"""The engine against a worker that is played by the test: control, text, defaults, timings."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from trioserve.engine.api import GenerationDefaults
from trioserve.engine.engine import Engine
from trioserve.engine.prompts import LONG_TEXT, MAX_BAD_WORD_CHARS, Prompts
from trioserve.engine.supervisor import open_engine
from trioserve.errors import InvalidRequest, NotReady, WorkerStalled
from trioserve.ipc.fake import FakeWorker
from trioserve.ipc.messages import Command, Control, Controlled, Delta, StepOutput, Work
from trioserve.sampling_params import SamplingParams
from trioserve.text import chat_template
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.template_limits import Limits

from .engine_workers import (
    GREEDY,
    STATS,
    Workers,
    become_ready,
    command,
    make_config,
    serve_tokens,
    until_end,
)

ACTIONS: list[Callable[[Engine], Awaitable[Any]]] = [
    Engine.pause,
    Engine.resume,
    Engine.reset_prefix_cache,
]
USER = {"role": "user", "content": "Hi"}


async def answer_controls(fake: FakeWorker) -> None:
    """Ready, then answer each Control; the second reset finds blocks in use."""
    await become_ready(fake)
    resets = 0
    async for received in fake.commands:
        if isinstance(received, Control):
            resets += received.action == "reset_prefix_cache"
            await fake.send(Controlled(received.token, resets < 2))
    await fake.exit(0)


async def test_pause_resume_and_reset_are_answered() -> None:
    async with open_engine(make_config(), worker_factory=Workers(answer_controls)) as engine:
        assert not engine.status.paused
        await engine.pause()
        await engine.pause()
        assert engine.status.paused
        await engine.resume()
        assert not engine.status.paused
        assert await engine.reset_prefix_cache()
        assert not await engine.reset_prefix_cache()
    for action in ACTIONS:
        with pytest.raises(NotReady):
            await action(engine)


async def test_a_watch_sees_the_pause() -> None:
    async with open_engine(make_config(), worker_factory=Workers(answer_controls)) as engine:
        watch = engine.watch()
        assert not (await anext(watch)).paused
        await engine.pause()
        assert (await anext(watch)).paused


@pytest.mark.parametrize("action", ACTIONS)
async def test_control_of_a_worker_that_dies_is_refused(
    autojump_clock: trio.testing.MockClock, action: Callable[[Engine], Awaitable[Any]]
) -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        assert isinstance(await command(fake), Control)
        await fake.exit(9)

    config = make_config(engine={"on_death": "restart"})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        with pytest.raises(NotReady, match="restarting"):
            await action(engine)
        assert not engine.status.paused


async def test_a_pause_whose_caller_left_is_seen_all_the_same() -> None:
    go = trio.Event()

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        received = await command(fake)
        assert isinstance(received, Control)
        await go.wait()
        await fake.send(Controlled(received.token, True))
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.pause)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        go.set()
        await engine.wait_change()
        assert engine.status.paused


async def test_a_pause_outlives_the_worker(autojump_clock: trio.testing.MockClock) -> None:
    """The next one is paused before it gets the requests that were kept for it."""
    received: list[list[Command]] = []

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        received.append([])
        async for one in fake.commands:
            received[-1].append(one)
            if isinstance(one, Control):
                await fake.send(Controlled(one.token, True))
            elif len(received) == 1:
                await fake.exit(9)
                return
        await fake.exit(0)

    config = make_config(engine={"on_death": "restart", "resubmit": True})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        await engine.pause()
        engine.submit([1], GREEDY)
        while engine.status.incarnation == 1:
            await engine.wait_change()
        await engine.wait_ready()
        await trio.testing.wait_all_tasks_blocked()
        assert engine.status.paused
        await engine.resume()
        assert not engine.status.paused
    second = [one.action if isinstance(one, Control) else type(one) for one in received[1]]
    assert second == ["pause", Work, "resume"]


async def test_a_paused_worker_is_not_stuck_but_one_that_does_not_resume_is(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", trio.current_time)  # of the page

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        pause = await command(fake)
        assert isinstance(pause, Control)
        fake.status.begin("paused", float("inf"))
        await fake.send(Controlled(pause.token, True))
        await trio.sleep_forever()

    config = make_config(watchdog={"interval_s": 0.5, "step_budget_s": 3.0})
    with pytest.raises(WorkerStalled, match="has not taken up a request in 3"):
        async with open_engine(config, worker_factory=Workers(script)) as engine:
            await engine.pause()
            engine.submit([1], GREEDY)
            await trio.sleep(600)
            assert engine.status.paused
            with pytest.raises(NotReady):
                await engine.resume()


# ------------------------------------------------------------------------------ submission


async def test_bad_words_are_sent_as_tokens_bare_and_after_a_space() -> None:
    works: list[Work] = []

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        async for received in fake.commands:
            assert isinstance(received, Work)
            works.append(received)
        await fake.exit(0)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        forms = [
            tuple(await engine.encode_prompt(text, add_special_tokens=False))
            for text in ("cat", " cat", " dog")
        ]
        engine.submit([1], SamplingParams(bad_words=("cat", " dog", "cat")))
        engine.submit([1], GREEDY)
        await trio.testing.wait_all_tasks_blocked()
        long = tuple(letter * 1000 for letter in "abcdefghi")
        assert sum(map(len, long)) > MAX_BAD_WORD_CHARS
        for words in (long, ("xyz " * 130, "zyx " * 130)):
            with pytest.raises(InvalidRequest, match="bad_words") as caught:
                engine.submit([1], SamplingParams(bad_words=words))
            assert caught.value.param == "bad_words"
        for words in [("cat",), ("cat", " dog"), ("cat", " dog")]:
            engine.submit([1], SamplingParams(bad_words=words))
        await trio.testing.wait_all_tasks_blocked()
    one, both = tuple(forms[:2]), tuple(forms)
    assert [work.bad_words_ids for work in works] == [both, (), one, both, both]


async def test_timings_say_when_it_began_and_when_tokens_came(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", trio.current_time)

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        work = await command(fake)
        assert isinstance(work, Work)
        for ids, reason in (([], None), ([1], None), ([1], None), ([], "abort")):
            await trio.sleep(1)
            await fake.send(StepOutput(0, [Delta(work.id, ids, reason)], STATS))
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        began = trio.current_time()
        stream = engine.submit([1], GREEDY)
        assert stream.timings.submitted_s == pytest.approx(began)
        assert stream.timings.started_s is stream.timings.first_token_s is None
        async for _ in stream:
            pass
        after = [
            stream.timings.started_s,
            stream.timings.first_token_s,
            stream.timings.last_token_s,
        ]
        assert after == [pytest.approx(began + s) for s in (1, 2, 3)]


async def test_the_step_that_began_a_request_counts_from_its_own_beginning(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a prompt of one step would seem to wait while it is prefilled; an abort begins none."""
    monkeypatch.setattr("time.monotonic", trio.current_time)
    steps = [
        (Delta(0, [1], "length"), 0.75),
        (Delta(1, [1], "length"), 60.0),
        (Delta(2, [], "abort"), 0.0),
    ]

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        for delta, step_s in steps:
            await command(fake)
            await trio.sleep(1)
            stats = msgspec.structs.replace(STATS, step_s=step_s)
            await fake.send(StepOutput(0, [delta], stats))
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        waited = []
        for _ in steps:
            stream = engine.submit([1], GREEDY)
            async for _ in stream:
                pass
            timings = stream.timings
            waited.append(timings.started_s and timings.started_s - timings.submitted_s)
        assert waited == [pytest.approx(0.25), 0, None]


async def test_generation_defaults_apply_without_sampling_alone() -> None:
    works: list[Work] = []

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        async for received in fake.commands:
            if isinstance(received, Work):
                works.append(received)
        await fake.exit(0)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        assert engine.generation_defaults == GenerationDefaults()
        defaults = GenerationDefaults(temperature=0.6, top_k=20, max_tokens=9)
        model = attrs.evolve(engine.model, generation=defaults)
        engine.set_model(model, engine.tokenizer, None)
        assert engine.generation_defaults == defaults
        for sampling in (None, SamplingParams(top_p=0.5)):
            async with engine.generate([1], sampling):
                await trio.testing.wait_all_tasks_blocked()
    assert [work.sampling for work in works] == [
        SamplingParams(temperature=0.6, top_k=20, max_tokens=9),
        SamplingParams(top_p=0.5),
    ]


# ------------------------------------------------------------------------------------ text


async def test_chats_are_rendered_as_asked() -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:

        async def shown(**options: Any) -> str:
            messages = [USER, {"role": "assistant", "content": "Well, "}]
            return await engine.decode(await engine.render_chat(messages, **options))

        whole = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, <|im_end|>\n"
        assert await shown() == whole + "<|im_start|>assistant\n"
        assert await shown(add_generation_prompt=False) == whole
        going_on = {"add_generation_prompt": False, "continue_final_message": True}
        assert await shown(**going_on) == whole.removesuffix("<|im_end|>\n")
        own = "{{ bos_token }}{{ messages[-1].content }}{{ mood }}"
        kwargs = {"chat_template": own, "template_kwargs": {"mood": "!"}}
        assert await shown(**kwargs) == "<|endoftext|>Well, !"
        for options, param in (
            ({"continue_final_message": True}, "continue_final_message"),
            ({"chat_template": "{% if %}"}, "chat_template"),
            ({"chat_template": "{{ 1 / 0 }}"}, "messages"),
            ({"chat_template": "x", **going_on}, "continue_final_message"),
            *(
                ({"template_kwargs": {name: True}, "chat_template": own}, f"{prefix}.{name}")
                for prefix in ["chat_template_kwargs"]
                for name in ("add_generation_prompt", "continue_final_message", "messages")
            ),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await shown(**options)
            assert caught.value.param == param


async def test_a_templates_special_tokens_are_added_only_when_asked() -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        with_special = await engine.encode_prompt("x")
        render = {"chat_template": "x"}
        assert await engine.render_chat([USER], add_special_tokens=True, **render) == with_special
        plain = await engine.encode_prompt("x", add_special_tokens=False)
        assert await engine.render_chat([USER], **render) == plain


async def test_a_template_that_does_not_end_holds_up_no_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, done = threading.Event(), threading.Event()

    def stuck(self: Prompts, source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        begun.set()
        assert done.wait(20)
        return source

    monkeypatch.setattr(Prompts, "_render_with", stuck)
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        rendered: list[list[int]] = []

        async def render() -> None:
            rendered.append(await engine.render_chat([USER], chat_template="x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(render)
            await trio.to_thread.run_sync(begun.wait)
            assert await engine.decode([70] * (LONG_TEXT + 1))
            assert rendered == []
            done.set()
        assert rendered == [await engine.encode_prompt("x", add_special_tokens=False)]


async def test_a_template_without_an_end_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(chat_template, "DEFAULT_LIMITS", Limits(steps=50_000))
    threads: list[int] = []
    render_it = ChatTemplate.render

    def render(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        threads.append(threading.get_ident())
        return render_it(self, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", render)
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        for given, param in [(endless, "chat_template"), (None, "messages")]:
            monkeypatch.setattr(engine._text, "_template", ChatTemplate(endless))
            with pytest.raises(InvalidRequest, match="stopped: it took over 50000 steps") as caught:
                await engine.render_chat([USER], chat_template=given)
            assert caught.value.param == param
            assert await engine.render_chat([USER], chat_template="x")
        # The model's own began beside the others, and was begun anew where it holds up nobody.
        _, _, first, second, _ = threads
        assert first == threading.get_ident() != second


async def test_ids_are_decoded_and_named() -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        ids = await engine.encode_prompt("a b", add_special_tokens=False)
        assert await engine.decode([2, *ids]) == "<|im_end|>a b"
        assert await engine.decode([2, *ids], skip_special_tokens=True) == "a b"
        assert await engine.decode(ids * 20_000) == "a b" * 20_000  # in a thread
        assert engine.token_text(2) == "<|im_end|>"
        assert [engine.token_text(id) for id in (-1, 10**6, 2**40)] == ["", "", ""]
        for bad in (-1, 2**40):
            with pytest.raises(InvalidRequest, match=r"tokens\[1\]"):
                await engine.decode([1, bad])
    before = Engine(make_config())
    with pytest.raises(NotReady):
        before.token_text(1)
    with pytest.raises(NotReady):
        await before.decode([1])
    assert before.generation_defaults == GenerationDefaults()
