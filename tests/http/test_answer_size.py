"""Answers with very many log probabilities: how many there may be, and what they take."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest

from trioserve.engine.api import GenerationDefaults, Usage
from trioserve.http import render
from trioserve.http.generation import ChoiceSoFar
from trioserve.http.render import Head
from trioserve.http.render_chat import ChatRenderer
from trioserve.http.render_completion import CompletionRenderer, Prompt
from trioserve.http.schema import Shape

from .bodies import CHAT
from .client import serving
from .fake_engine import FakeEngine, named, prompt_entries

LIMIT = 1000

# ------------------------------------------------------------------------------ the bound


@pytest.mark.parametrize(
    ("path", "body", "most", "param"),
    [
        # Completions: tokens of the answer times 1 + alternatives, for each answer.
        ("/v1/completions", {"prompt": "hi", "logprobs": 4, "max_tokens": 200}, 1000, ""),
        ("/v1/completions", {"prompt": "hi", "logprobs": 4, "max_tokens": 201}, 1005, "logprobs"),
        ("/v1/completions", {"prompt": "hi", "logprobs": 4, "max_tokens": 101, "n": 2}, 1010, "l"),
        ("/v1/completions", {"prompt": ["hi"] * 51, "logprobs": 4, "max_tokens": 4}, 1020, "l"),
        (
            "/v1/completions",
            {"prompt": "hi", "logprob_token_ids": [1] * 9, "max_tokens": 101},
            1010,
            "l",
        ),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 300, "best_of": 4}, 1200, "logprobs"),
        # The prompt's own, shown with each answer.
        ("/v1/completions", {"prompt": "x" * 250, "prompt_logprobs": 1, "n": 2}, 1000, ""),
        ("/v1/completions", {"prompt": "x" * 251, "prompt_logprobs": 1, "n": 2}, 1004, "prompt_l"),
        ("/v1/completions", {"prompt": ["x" * 99] * 6, "prompt_logprobs": 1}, 1188, "prompt_l"),
        (
            "/v1/completions",
            {"prompt": "x" * 500, "echo": True, "logprobs": 1, "max_tokens": 1},
            1002,
            "logprobs",
        ),
        # Chats may be as long as the context leaves.
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}, 1020, "logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True}, 510, ""),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "n": 2}, 1020, "logprobs"),
        ("/v1/chat/completions", CHAT | {"n": 128, "max_tokens": 500}, 0, ""),
        (
            "/v1/responses",
            {"input": "hi", "top_logprobs": 1, "max_output_tokens": 501},
            1002,
            "logprobs",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_answer_could_hold_is_bounded(
    path: str, body: dict[str, Any], most: int, param: str, stream: bool
) -> None:
    if stream and ("prompt_logprobs" in body or "best_of" in body):
        return
    engine = FakeEngine(max_model_len=512)
    async with serving(engine, max_answer_logprobs=LIMIT) as served:
        answer = await served.call("POST", path, body | {"stream": stream})
        assert answer.status == (400 if param else 200), answer.body
        if param:
            error = answer.json["error"]
            assert f"could hold {most} log probabilities" in error["message"]
            assert f"http.max_answer_logprobs allows {LIMIT}" in error["message"]
            assert error["param"].startswith(param)
            assert engine.streams == []


async def test_a_model_with_a_limit_of_its_own_is_counted_by_that() -> None:
    engine = FakeEngine(max_model_len=2048)
    engine.defaults = GenerationDefaults(max_tokens=500)
    async with serving(engine, max_answer_logprobs=LIMIT) as served:
        for top, status in [(1, 200), (2, 400)]:
            asked = CHAT | {"logprobs": True, "top_logprobs": top}
            assert (await served.call("POST", "/v1/chat/completions", asked)).status == status


# --------------------------------------------------------------------------- what they take


def make(kind: str, num_tokens: int, num_choices: int) -> Any:
    """A renderer of a long answer with all there is about it, and its choices."""
    shape = Shape(logprobs=3, prompt_logprobs=3)
    head = Head(
        **{"id": "a", "created": 1, "model": "m", "fingerprint": "f", "num_prompt_tokens": 1},
        shape=shape,
        timings=dict,
    )
    token_ids = [5 + i % 200 for i in range(num_tokens)]
    given = prompt_entries(token_ids, 3)
    top = [named(1 + i, -0.1 * i) for i in range(3)]
    tokens = [named(i, -0.5 * i, top=top) for i in token_ids]
    choices = [ChoiceSoFar(["x"], [1], [*tokens], given, "stop") for _ in range(num_choices)]
    if kind == "chat":
        chat = ChatRenderer(head, num_choices, echo="", prompt_token_ids=[1], prompt_text=None)
        return chat, choices
    prompt = Prompt(token_ids, "y" * num_tokens, "y")
    return CompletionRenderer(head, [prompt], num_choices, scores=False), choices


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7])
def test_how_an_answer_is_cut_for_writing_does_not_show(
    kind: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for at_once in (1, 2, 3, 1000):
        monkeypatch.setattr(render, "AT_ONCE", at_once)
        renderer, choices = make(kind, num_tokens, 2)
        written.append(orjson.dumps(renderer.whole(choices, Usage(1, 1, 0))))
    assert written == written[:1] * 4
    assert len(orjson.loads(written[0])["choices"]) == 2


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_large_answer_is_not_held_as_objects_beside_its_json(kind: str) -> None:
    renderer, choices = make(kind, 3000, 4)
    tracemalloc.start()
    try:
        body = orjson.dumps(renderer.whole(choices, Usage(1, 1, 0)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(body) > 1_000_000
    assert peak < 3 * len(body)
    assert not any(choice.logprobs for choice in choices)
