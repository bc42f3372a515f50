"""Control tokens as text, wanted tokens, log probabilities of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioserve.engine.api import TokenLogprob
from trioserve.ipc.messages import Delta, TokenLogprobs
from trioserve.sampling_params import SamplingParams
from trioserve.text.stream import TextStream
from trioserve.text.tokenizer import Tokenizer

from .test_stream import Answer, logprobs_of, one_by_one

SHOWN = {"skip_special_tokens": False}


def specials(tokenizer: Tokenizer) -> list[int]:
    return [id for id in range(tokenizer.num_token_ids) if tokenizer.is_special(id)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_control_tokens_are_text_when_asked(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """The text is the library's, and the bytes of tokens and alternatives agree with it."""
    control = specials(any_tokenizer)
    token = st.one_of(st.sampled_from(control), st.integers(260, 400))
    ids = [control[-1], *data.draw(st.lists(token, min_size=1, max_size=12))]
    answer = Answer(any_tokenizer, one_by_one(ids, "length"), [control[-1]], logprobs=2, **SHOWN)
    assert answer.text == answer.bytes.decode(errors="replace")
    # After a prompt of text nothing is stripped; the library strips before the first token.
    whole = any_tokenizer.decode([control[-1], *ids], skip_special_tokens=False)
    assert whole.endswith(answer.text)
    for entry in answer.logprobs:
        for top in entry.top:
            if any_tokenizer.is_special(top.token_id):
                assert top.token_bytes.decode() == top.token != ""
    hidden = Answer(any_tokenizer, one_by_one(ids, "length"), [control[-1]], logprobs=2)
    assert hidden.token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "the"),
        ({"include_stop_str_in_output": True}, "the"),
        (SHOWN, "the<|im_start|>"),
        ({**SHOWN, "include_stop_str_in_output": True}, "the<|im_start|><|im_end|>"),
    ],
)
def test_the_end_token_is_text_only_if_all_ask_for_it(
    byte_level: Tokenizer, options: dict[str, bool], text: str
) -> None:
    ids = byte_level.encode("the<|im_start|><|im_end|>")
    answer = Answer(byte_level, one_by_one(ids, "stop"), logprobs=0, **options)
    assert answer.text == text
    assert answer.bytes == text.encode()
    assert [entry.token for entry in answer.logprobs] == ["the", "<|im_start|>", "<|im_end|>"]
    assert answer.end == ("stop", None)


def test_a_stop_string_may_be_a_control_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the<|im_start|>dog")
    shown = Answer(byte_level, one_by_one(ids, "length"), stop=("<|im_start|>",), **SHOWN)
    assert (shown.text, shown.end) == ("the", ("stop", "<|im_start|>"))
    hidden = Answer(byte_level, one_by_one(ids, "length"), stop=("<|im_start|>",))
    assert (hidden.text, hidden.end) == ("thedog", ("length", None))


def test_ranks_and_wanted_tokens_are_passed_on(byte_level: Tokenizer) -> None:
    [token_id] = byte_level.encode("the")
    [end] = byte_level.encode("<|im_end|>")
    wanted = ((end, -3.0), (token_id, -1.5))
    given = TokenLogprobs(token_id, -1.5, 7, [(1, -0.5), (2, -0.6)], wanted)
    delta = Delta(1, [token_id], "length", None, [given])
    answer = Answer(byte_level, [delta], logprobs=2, logprob_token_ids=(end, token_id))
    (entry,) = answer.logprobs
    assert entry.rank == 7
    assert [top.rank for top in entry.top] == [1, 2]
    assert entry.wanted == (
        TokenLogprob("<|im_end|>", end, b"", -3.0, ()),
        TokenLogprob("the", token_id, b"the", -1.5, ()),
    )


# ----------------------------------------------------------------------------- the prompt


def scores_of(ids: Sequence[int]) -> list[TokenLogprobs | None]:
    return [None, *logprobs_of(ids[1:])]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_prompt_scores_have_the_prompts_bytes(
    any_tokenizer: Tokenizer, skip: bool, size: int
) -> None:
    control = specials(any_tokenizer)[-1]
    ids = [control, *any_tokenizer.encode("the dog 日", add_special_tokens=False), control]
    sampling = SamplingParams(prompt_logprobs=1, skip_special_tokens=skip)
    stream = TextStream(any_tokenizer, ids, sampling)
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        stream.push_prompt(ids[part], scores_of(ids)[part])
    delta = stream.push(Delta(1, []))
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", [], None)
    entries = delta.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [entry and entry.token_id for entry in entries[1:]] == ids[1:]
    data = b"".join(entry.token_bytes for entry in entries if entry is not None)
    name = any_tokenizer.token_content(control) or ""
    text = any_tokenizer.decode(ids, skip_special_tokens=skip)
    assert data.decode() == text.removeprefix("" if skip else name)
    assert [entry.rank for entry in entries if entry is not None] == [2] * (len(ids) - 1)
    # They come once.
    last = stream.push(Delta(1, ids[1:2], "length"))
    assert last is not None
    assert last.prompt_logprobs is None


def test_the_first_delta_has_them_with_the_first_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the dog")
    stream = TextStream(byte_level, ids, SamplingParams(prompt_logprobs=0))
    stream.push_prompt(ids, scores_of(ids))
    first = stream.push(Delta(1, ids[:1], None))
    assert first is not None
    assert first.text == "the"
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(ids)
