"""Streamed and plain answers agree, whatever the engine says and however it is cut."""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioserve.engine.api import TextDelta, TokenLogprob

from .client import serving
from .fake_engine import FakeEngine, FakeStream, named
from .joining import join

SAME = ("id", "created", "model", "system_fingerprint")

logprobs = st.one_of(st.floats(-20, 0), st.just(-math.inf))
alternatives = st.lists(st.integers(0, 255), max_size=3, unique=True)


@attrs.frozen
class Scripted:
    """What one answer is made of."""

    deltas: list[TextDelta]

    def __call__(self, stream: FakeStream) -> None:
        if stream.sampling.logprobs is None:
            cut = [without_logprobs(delta) for delta in self.deltas]
            stream.push(*cut)
        else:
            stream.push(*self.deltas)


def without_logprobs(delta: TextDelta) -> TextDelta:
    """The delta as a request without log probabilities gets it."""
    return TextDelta(delta.text, delta.token_ids, None, delta.finish_reason, delta.stop_reason)


@st.composite
def answers(draw: st.DrawFn) -> Scripted:
    """Texts cut into tokens anywhere, tokens into deltas wherever their text is whole."""
    text = draw(st.text(st.sampled_from('ab é😀\n"\\\u2028'), max_size=8))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)) | {0, len(data)})
    tokens, deltas, held = [], [], b""
    for start, end in itertools.pairwise(cuts):
        piece = data[start:end]
        token_id = draw(st.integers(0, 255))
        top = [named(other, -1.0) for other in draw(alternatives)]
        shown = piece.decode(errors="replace")
        tokens.append(TokenLogprob(shown, token_id, piece, draw(logprobs), top))
        held += piece
        if _is_whole(held) and draw(st.booleans()):
            deltas.append(_delta(tokens, held))
            tokens, held = [], b""
    reason = draw(st.sampled_from(["stop", "length"]))
    stop = draw(st.sampled_from([None, "x", 7])) if reason == "stop" else None
    deltas.append(_delta(tokens, held, reason, stop))
    return Scripted(deltas)


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _delta(
    tokens: list[TokenLogprob], data: bytes, reason: str | None = None, stop: Any = None
) -> TextDelta:
    ids = [token.token_id for token in tokens]
    return TextDelta(data.decode(), ids, list(tokens), reason, stop)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any], int]:
    """A route, a body, and how many answers it asks for."""
    fields = {
        "n": draw(st.integers(1, 3)),
        "echo": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
        "return_tokens_as_token_ids": draw(st.booleans()),
    }
    top = draw(st.one_of(st.none(), st.integers(0, 3)))
    if draw(st.booleans()):
        last = {"role": draw(st.sampled_from(["user", "assistant"])), "content": "é"}
        fields |= {"messages": [last], "return_prompt_text": draw(st.booleans())}
        if top is not None:
            fields |= {"logprobs": True, "top_logprobs": top}
        return "/v1/chat/completions", fields, fields["n"]
    prompts = draw(
        st.lists(st.sampled_from(["a", "é😀"]), min_size=1, max_size=2)
        | st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=3), min_size=1, max_size=2)
    )
    scores = {"max_tokens": 0} if fields["echo"] and draw(st.booleans()) else {}
    body = fields | scores | {"prompt": prompts, "logprobs": top}
    return "/v1/completions", body, fields["n"] * len(prompts)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(request=requests(), usage=st.sampled_from(["none", "last", "all"]), data=st.data())
def test_api_07_joined_stream_is_the_whole_answer(
    request: tuple[str, dict[str, Any], int], usage: str, data: st.DataObject
) -> None:
    path, body, num_answers = request
    scripts = [data.draw(answers()) for _ in range(num_answers)]
    options = {"include_usage": usage != "none", "continuous_usage_stats": usage == "all"}

    async def ask() -> tuple[Any, list[Any]]:
        engine = FakeEngine(script=lambda stream: scripts[stream.id % num_answers](stream))
        async with serving(engine) as served:
            asked = {"X_Request_Id": "same"}
            plain = await served.call("POST", path, body, **asked)
            assert plain.status == 200, plain.body
            streamed = body | {"stream": True, "stream_options": options}
            return plain.json, (await served.call("POST", path, streamed, **asked)).events

    whole, events = trio.run(ask)
    joined = join(events)
    for name in SAME:
        if name != "created":
            assert joined[name] == whole[name]
    assert len(joined["choices"]) == len(whole["choices"]) == num_answers
    for one, other in zip(joined["choices"], whole["choices"], strict=True):
        check_choice(one, other)
    check_usage(usage, joined["usages"], whole["usage"])
    for name in ("prompt_token_ids", "prompt_text"):
        assert joined.get(name) == whole.get(name)


def check_choice(joined: dict[str, Any], whole: dict[str, Any]) -> None:
    for name, value in joined.items():
        if name == "message":
            assert value == {key: whole["message"][key] for key in value}
        else:
            assert value == whole[name], name
    for name, value in whole.items():
        assert value is None or name in joined or name == "prompt_logprobs", name
    logprobs = whole["logprobs"]
    if logprobs is not None and "text_offset" in logprobs:
        check_offsets(logprobs, whole["text"])


def check_offsets(logprobs: dict[str, Any], text: str) -> None:
    assert len({len(column) for column in logprobs.values()}) == 1
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for name, offset in zip(logprobs["tokens"], offsets, strict=True):
        # A character of a prompt may be several tokens, none of which is text by itself.
        if not name.startswith(("bytes:", "token_id:")) and "\ufffd" not in name:
            assert text[offset:].startswith(name)


def check_usage(asked: str, usages: list[Any], whole: dict[str, Any]) -> None:
    if asked == "none":
        assert usages == []
        return
    *others, last = usages
    assert last == whole
    if asked == "last":
        assert others == [None] * len(others)
        return
    counts = [usage["completion_tokens"] for usage in others]
    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"]
    assert {usage["prompt_tokens"] for usage in others} == {whole["prompt_tokens"]}
