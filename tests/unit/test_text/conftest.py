"""Real tokenizers of the two families, trained here on a few sentences, and a corpus that hurts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import trioserve.text
from trioserve.text.tokenizer import Tokenizer

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "the end of the thing is the beginning of another thing, isn't it?",
    "def run(self):\n    return self.value\n\n\nclass A:\n    pass\n",
    "नमस्ते दुनिया, यह एक परीक्षा है। नमस्ते फिर से।",
    "Où est l'été? Là-bas, à côté du café.",
] * 4

CORPUS = {
    "ascii": "the dog and the fox",
    "family": "the 👨‍👩‍👧‍👦 family and 👩🏽‍🚀",
    "flags": "🇩🇪🇧🇷🇯🇵 flags 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "cjk": "日本語の文章と中文字符、한국어",
    "devanagari": "नमस्ते दुनिया",
    "combining": "e\u0301 a\u0323\u0302 Z\u0351\u036b\u0343",
    "code": "def f():\n    return [1, 2]\n\n\t# end\r\n",
    "spaces": "  two  spaces   three ",
}

SPECIALS = ("<unk>", "<s>", "</s>")


def _trained(byte_level: bool) -> dict[str, Any]:
    library = tokenizers.Tokenizer(models.BPE())
    if byte_level:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        texts = TRAINING_TEXT
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        texts = [("▁" + text).replace(" ", "▁") for text in TRAINING_TEXT]
        library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=520, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    library.train_from_iterator(texts, trainer)
    return json.loads(library.to_str())


def _added(token_id: int, content: str, special: bool, **flags: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
        **flags,
    }


def byte_level_json() -> dict[str, Any]:
    """Byte-level BPE with two control tokens and one visible added token at the end."""
    spec = _trained(byte_level=True)
    size = len(spec["model"]["vocab"])
    spec["added_tokens"] = [
        _added(size, "<|im_start|>", True),
        _added(size + 1, "<|im_end|>", True),
        _added(size + 2, "<tool call>", False),
    ]
    return spec


def sentencepiece_json() -> dict[str, Any]:
    """As Llama 2: control tokens, 256 byte tokens, then pieces; the decoder strips one space."""
    spec = _trained(byte_level=False)
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    spec["model"] |= {
        "vocab": {piece: index for index, piece in enumerate(pieces)},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    spec["added_tokens"] = [_added(i, piece, True) for i, piece in enumerate(SPECIALS)]
    space, mark = {"String": " "}, {"String": "▁"}
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": space, "content": "▁"},
        ],
    }
    spec["pre_tokenizer"] = None
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": mark, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return spec


def metaspace_json() -> dict[str, Any]:
    """The same pieces, with the Metaspace step that other converters write."""
    spec = sentencepiece_json()
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    byte_fallback, fuse = {"type": "ByteFallback"}, {"type": "Fuse"}
    spec["normalizer"] = None
    spec["pre_tokenizer"] = metaspace
    spec["decoder"] = {"type": "Sequence", "decoders": [byte_fallback, metaspace, fuse]}
    return spec


BUILDERS = {
    "byte-level": byte_level_json,
    "sentencepiece": sentencepiece_json,
    "metaspace": metaspace_json,
}


@pytest.fixture(scope="session")
def specs() -> dict[str, dict[str, Any]]:
    """The tokenizer.json of each family; copy before changing."""
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture(scope="session")
def all_tokenizers(
    specs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, spec in specs.items():
        (folder / f"{name}.json").write_text(json.dumps(spec))
    return {name: Tokenizer(str(folder / f"{name}.json")) for name in specs}


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def any_tokenizer(request: pytest.FixtureRequest, all_tokenizers: dict[str, Tokenizer]) -> Any:
    return all_tokenizers[request.param]


@pytest.fixture(scope="session")
def byte_level(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["byte-level"]


@pytest.fixture(scope="session")
def sentencepiece(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["sentencepiece"]


@pytest.fixture(scope="session")
def metaspace(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["metaspace"]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[dict[str, Any]], Tokenizer]:
    """Make a Tokenizer from a tokenizer.json given as an object."""

    def make(spec: dict[str, Any]) -> Tokenizer:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(spec))
        return Tokenizer(str(path))

    return make


@pytest.fixture(scope="session", params=sorted(CORPUS))
def hard_text(request: pytest.FixtureRequest) -> str:
    return CORPUS[request.param]


@pytest.fixture
def count_lines() -> Callable[[Callable[[], object]], int]:
    """How many source lines of trioserve.text a call executes: work, measured without a clock."""
    folder = str(Path(trioserve.text.__file__).parent)

    def count(call: Callable[[], object]) -> int:
        num_lines = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal num_lines
            if not frame.f_code.co_filename.startswith(folder):
                return None
            num_lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
        return num_lines

    return count
