"""Characters, stop strings and log probabilities, from tokens to what clients read.

Names carry ids of field failures. Each is asked for in one piece and as a stream.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trioserve.text.tokenizer import Tokenizer

from .bodies import CHAT, COMPLETION
from .client import serving
from .joining import join
from .text_engine import TextEngine, byte_tokenizer

TEXTS = {
    "family": "the 👨‍👩‍👧‍👦 family",
    "flags": "🇩🇪🇧🇷 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "cjk": "日本語の文章",
    "devanagari": "नमस्ते दुनिया",
    "combining": "e\u0301 a\u0323\u0302",
    "lines": "a\u2028b\r\nc\n\nd\x00\x1f",
}
SIZES = [(1,), (2, 3), (100,)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return byte_tokenizer(folder)


async def both_ways(engine: TextEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The only choice, which is the same in one piece and as a stream."""
    async with serving(engine) as served:
        whole = await served.call("POST", path, body)
        assert whole.status == 200, whole.body
        answer = await served.call("POST", path, body | {"stream": True})
        [choice], [joined] = whole.json["choices"], join(answer.events)["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        joined_text = joined["message"]["content"] if "message" in joined else joined["text"]
        assert text == joined_text
        for name in ("logprobs", "finish_reason", "stop_reason"):
            assert choice[name] == joined.get(name), name
        return choice | {"text": text}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", TEXTS)
async def test_api_02_characters_are_whole(
    name: str, sizes: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    text = TEXTS[name]
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        engine = TextEngine(tokenizer, text.encode(), sizes)
        choice = await both_ways(engine, path, body | {"max_tokens": 1000})
        assert choice["text"] == text
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("sizes", SIZES)
async def test_api_02_cut_inside_a_character(sizes: tuple[int, ...], tokenizer: Tokenizer) -> None:
    data = "é😀".encode()
    for length in range(1, len(data) + 1):
        engine = TextEngine(tokenizer, data, sizes)
        choice = await both_ways(engine, "/v1/completions", COMPLETION | {"max_tokens": length})
        assert choice["text"] == data[:length].decode(errors="replace")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("data", "stop", "text", "matched"),
    [
        ("alpha beta gamma delta", "beta gamma", "alpha ", "beta gamma"),
        ("alpha beta gamma delta", ["gamma", "beta", "zeta", "alpha b"], "", "alpha b"),
        ("one\ntwo", "\n", "one", "\n"),
        ("grün 😀! x", "😀!", "grün ", "😀!"),
        ("almost st", "sto", "almost st", None),
        ("ababac", "abac", "ab", "abac"),
    ],
)
async def test_api_03_stop_strings(
    data: str,
    stop: str | list[str],
    text: str,
    matched: str | None,
    sizes: tuple[int, ...],
    tokenizer: Tokenizer,
) -> None:
    for include in (False, True):
        engine = TextEngine(tokenizer, data.encode(), sizes)
        body = {"stop": stop, "max_tokens": 100, "include_stop_str_in_output": include}
        choice = await both_ways(engine, "/v1/chat/completions", CHAT | body)
        assert choice["text"] == text + (matched or "" if include else "")
        assert choice["stop_reason"] == matched
        assert choice["finish_reason"] == ("stop" if matched else "length")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("stop", [None, "!!"])
async def test_api_07_logprobs_are_in_step_with_the_text(
    stop: str | None, sizes: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    data = "é 😀! a!!b".encode()
    text = "é 😀! a" if stop else data.decode()
    fields = {"max_tokens": 100, "stop": stop}
    engine = TextEngine(tokenizer, data, sizes)
    chat = await both_ways(
        engine, "/v1/chat/completions", CHAT | fields | {"logprobs": True, "top_logprobs": 2}
    )
    content = chat["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).startswith(text.encode())
    assert all(entry["logprob"] == -1.5 for entry in content)  # the chosen, not the best
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    whole = await both_ways(
        TextEngine(tokenizer, data, sizes), "/v1/completions", COMPLETION | fields | {"logprobs": 0}
    )
    shown = whole["logprobs"]
    assert whole["text"] == text
    assert len(shown["tokens"]) == len(content)
    for index, byte in enumerate(text.encode()):
        if byte < 128:
            assert shown["tokens"][index] == chr(byte)
            assert text[shown["text_offset"][index]] == chr(byte)
