"""tokenizer.json from GGUF and sentencepiece, held against transformers and plain references."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import trio
from tokenizers import Regex, Tokenizer, pre_tokenizers

from trioserve.config.schema import DEFAULT_SOURCE
from trioserve.errors import ModelError
from trioserve.models.random_model import byte_alphabet
from trioserve.models.source import fetch, parse_source
from trioserve.text import convert as convert_module
from trioserve.text.convert import cache_key, convert, ensure_tokenizer
from trioserve.text.convert_gguf import STYLES

CORPUS = [
    "Hello, world! It's 2024; we'll pay $1,234.56 (or 7%).",
    "  two  spaces\tand a tab\r\n\n\n   three newlines ",
    "def f(x: int) -> int:\n    return x**2 + 0x1F  # naïve\n",
    "x=  12 and  42 and 3.14159e-10",
    "½ ² ① ٣٤٥ Ⅻ",
    "你好世界这是一个测试。 日本語のテキスト 한국어",
    "🙂🎉 👩‍👩‍👧 e\u0301 \u00a0nbsp\u3000wide \u200bzero",
    "Здравствуй мир, Ελληνικά, עברית, العربية",
    "I'M YOU'RE we'Ve camelCase snake_case HTTPServer",
    "a" * 60,
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<repo_name>x<file_sep>y <|im_start|x",
    "",
    " ",
    "\x00\x01\x7f",
]


def load(source: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(convert(source)))


# -------------------------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def real() -> Path:
    """The default model's GGUF file, from the machine's cache."""

    async def get() -> object:
        return await fetch(
            parse_source(DEFAULT_SOURCE), cache_dir=None, hf_token=None, progress=lambda *_: None
        )

    path = trio.run(get)
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="module")
def theirs(real: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real.parent, gguf_file=real.name)


@pytest.fixture(scope="module")
def ours(real: Path) -> Tokenizer:
    return load(real)


def test_same_ids_as_transformers_from_the_same_file(theirs: Any, ours: Tokenizer) -> None:
    """transformers drops the file's pre-tokenizer and always takes GPT-2's. SmolLM's own cuts every
    digit off first, which shows where blanks or symbols stand before a number."""
    agree = [text for text in CORPUS if theirs.encode(text) == ours.encode(text).ids]
    assert set(CORPUS) - set(agree) == {CORPUS[3], CORPUS[4]}
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    backend = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    for text in CORPUS:
        assert ours.encode(text).ids == backend.encode(text).ids, text


def test_same_texts_as_transformers(theirs: Any, ours: Tokenizer) -> None:
    for text in CORPUS:
        ids = ours.encode(text).ids
        for skip in (True, False):
            decoded = ours.decode(ids, skip_special_tokens=skip)
            assert decoded == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_same_special_tokens_as_transformers(theirs: Any, ours: Tokenizer) -> None:
    tokens = {token_id: token.content for token_id, token in theirs.added_tokens_decoder.items()}
    added = ours.get_added_tokens_decoder()
    assert {token_id: token.content for token_id, token in added.items()} == tokens
    assert all(token.special for token in added.values())


# ---------------------------------------------------------------------- byte-level vocabularies


def write_gguf(path: Path, edit: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(
    path: Path,
    pre: str | None = "gpt-2",
    merges: Iterable[str] = ("h e", "l l", "he ll", "Ġ 1", "1 2"),
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A vocabulary of bytes, a few merges, a control and a user's token."""

    def edit(writer: gguf.GGUFWriter) -> None:
        tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, "<|bos|>", "<user>"])
        writer.add_token_types([1] * len(tokens) + [3, 4])
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(len(tokens))
        writer.add_eos_token_id(len(tokens))
        more(writer)

    return write_gguf(path, edit)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def reference(name: str) -> Any:
    """How transformers cuts for the family, from its own pattern."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama3 = TikTokenConverter().pattern
    pattern = {"llama-bpe": llama3, "dbrx": llama3, "qwen2": PRETOKENIZE_REGEX}.get(name)
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "stablelm2"])
def test_pieces_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = load(byte_level(tmp_path / "m.gguf", name))
    expected = reference("qwen2" if name == "stablelm2" else name)
    for text in CORPUS:
        assert pieces(tokenizer, text) == [piece for piece, _ in expected.pre_tokenize_str(text)], (
            text
        )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "ab  12", ["ab", "ĠĠ", "1", "2"]),
        ("gpt-2", "ab  12", ["ab", "Ġ", "Ġ12"]),
        ("llama-bpe", "ab 12345", ["ab", "Ġ", "123", "45"]),
        ("qwen2", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("default", "a$$ 12345", ["a", "$$", "Ġ", "123", "45"]),
        ("tekken", "HTTPServer don't", ["HTTPServer", "Ġdon", "'t"]),
        ("tekken", "camelCase 12", ["camel", "Case", "Ġ", "1", "2"]),
    ],
)
def test_how_families_cut(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    assert pieces(load(byte_level(tmp_path / "m.gguf", name)), text) == expected


@pytest.mark.parametrize("name", STYLES)
def test_every_family_goes_there_and_back(tmp_path: Path, name: str) -> None:
    tokenizer = load(byte_level(tmp_path / "m.gguf", name))
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = text.replace("e\u0301", "é") if "qwen" in name else text
        assert tokenizer.decode(ids) == expected


def test_without_a_name_it_is_the_default(tmp_path: Path) -> None:
    without = convert(byte_level(tmp_path / "a.gguf", None))
    assert without == convert(byte_level(tmp_path / "b.gguf", "default"))


def test_ignored_merges(tmp_path: Path) -> None:
    """Llama 3 takes a piece that is a token whole, even where no merges lead to it."""

    def more(writer: gguf.GGUFWriter) -> None:
        for keys in writer.kv_data:
            keys["tokenizer.ggml.merges"].value = ["h e"]

    llama3 = load(byte_level(tmp_path / "a.gguf", "llama-bpe", more=more))
    gpt2 = load(byte_level(tmp_path / "b.gguf", "gpt-2", more=more))
    assert llama3.encode("hell", add_special_tokens=False).tokens == ["hell"]
    assert gpt2.encode("hell").tokens == ["he", "l", "l"]


def test_control_and_user_tokens(tmp_path: Path) -> None:
    tokenizer = load(byte_level(tmp_path / "m.gguf"))
    encoded = tokenizer.encode("hell<|bos|>hell<user>")
    assert encoded.tokens == ["hell", "<|bos|>", "hell", "<user>"]
    assert tokenizer.decode(encoded.ids) == "hellhell<user>"


@pytest.mark.parametrize(
    ("pre", "add_bos", "add_eos", "expected"),
    [
        ("gpt-2", None, None, ["he"]),
        ("gpt-2", True, None, ["<|bos|>", "he"]),
        ("gpt-2", True, True, ["<|bos|>", "he", "<|bos|>"]),
        ("gpt-2", None, True, ["he", "<|bos|>"]),
        ("llama-bpe", None, None, ["<|bos|>", "he"]),
        ("llama-bpe", False, None, ["he"]),
    ],
)
def test_bos_and_eos(
    tmp_path: Path, pre: str, add_bos: bool | None, add_eos: bool | None, expected: list[str]
) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        if add_eos is not None:
            writer.add_add_eos_token(add_eos)

    tokenizer = load(byte_level(tmp_path / "m.gguf", pre, more=more))
    assert tokenizer.encode("he").tokens == expected
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


# ------------------------------------------------------------------------------- sentencepiece

WORDS = ["▁", "▁h", "▁he", "he", "ll", "▁hell", "llo", "▁hello", "lo", "▁w", "or", "▁wor", "ld"]
LETTERS = [*"helowrd!", "é"]
PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((word, -float(rank + 1), 1) for rank, word in enumerate(WORDS)),
    *((letter, -float(rank + 50), 1) for rank, letter in enumerate(LETTERS)),
    ("<user>", 0.0, 4),
]


def merge_by_score(text: str) -> list[str]:
    """The rule itself: the two neighbours whose union scores best, until there are none."""
    scores = {piece: score for piece, score, kind in PIECES if kind == 1}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not found:
            break
        place = -max(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    known = [
        [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        for symbol in symbols
    ]
    return [token for tokens in known for token in tokens]


def sentencepiece_gguf(
    path: Path, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None
) -> Path:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece for piece, _, _ in PIECES])
        writer.add_token_scores([score for _, score, _ in PIECES])
        writer.add_token_types([kind for _, _, kind in PIECES])
        more(writer)

    return write_gguf(path, edit)


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def sentencepiece_model(path: Path, model_type: int = 2, unk_id: int = 0) -> Path:
    """The same vocabulary as sentencepiece itself writes it."""
    raw = b"".join(
        block(1, block(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))
        for text, score, kind in PIECES
    )
    trainer = (
        number(3, model_type) + number(35, 1) + number(40, unk_id) + number(41, 1) + number(42, -1)
    )
    normalizer = block(1, b"identity") + number(3, 1) + number(4, 0)
    path.write_bytes(raw + block(2, trainer) + block(3, normalizer))
    return path


SPM_CORPUS = ["hello world", "hello", "  hello  world!", "held lord", "éhé 你🙂", "", "ll" * 20]


@pytest.mark.parametrize("kind", ["gguf", "model"])
def test_pieces_merge_by_score(tmp_path: Path, kind: str) -> None:
    make = sentencepiece_gguf if kind == "gguf" else sentencepiece_model
    tokenizer = load(make(tmp_path / f"tokenizer.{kind}"))
    for text in SPM_CORPUS:
        encoded = tokenizer.encode(text)
        if text:
            assert encoded.tokens == ["<s>", *merge_by_score(text)], text
        assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_without_the_first_space(tmp_path: Path) -> None:
    tokenizer = load(
        sentencepiece_gguf(tmp_path / "m.gguf", lambda writer: writer.add_add_space_prefix(False))
    )
    encoded = tokenizer.encode("hello hello")
    assert encoded.tokens == ["<s>", "he", "llo", "▁hello"]
    assert tokenizer.decode(encoded.ids) == "hello hello"


def test_sentencepiece_user_tokens(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_gguf(tmp_path / "m.gguf"))
    encoded = tokenizer.encode("hello<user>hello</s>")
    assert encoded.tokens == ["<s>", "▁hello", "<user>", "▁hello", "</s>"]
    assert tokenizer.decode(encoded.ids) == "hello<user> hello"


def test_what_lies_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    source = sentencepiece_model(tmp_path / "tokenizer.model")
    size = len(PIECES)
    settings = {
        "add_bos_token": False,
        "added_tokens_decoder": {str(size): {"content": "<|im_end|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 1}))
    tokenizer = load(source)
    assert tokenizer.encode("hello<|im_end|><pad>").ids[-2:] == [size, size + 1]
    assert tokenizer.encode("hello").tokens == ["▁hello"]


def test_a_sentencepiece_model_without_an_unknown_token(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.model has no unknown token"):
        convert(sentencepiece_model(tmp_path / "tokenizer.model", unk_id=-1))


def test_unigram(tmp_path: Path) -> None:
    """The best cut by the sum of scores, not by the best pair first."""
    tokenizer = load(sentencepiece_model(tmp_path / "tokenizer.model", model_type=1))
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    # ▁hell -6 + lo -9 beats ▁he -3 + llo -7 + ... only where it covers the text.
    assert tokenizer.encode("hell").tokens == ["<s>", "▁hell"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "only sentencepiece models of kind bpe and unigram"),
        (b"\x0a", "is no sentencepiece model"),
        (b"\x0a\x7fabc", "is no sentencepiece model"),
        (b"\xff" * 20, "is no sentencepiece model"),
        (b"hello world, this is text", "is no sentencepiece model|only sentencepiece"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    ],
)
def test_files_that_are_no_sentencepiece_model(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        convert(tmp_path / "tokenizer.model")


# -------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path: write_gguf(path, lambda writer: writer.add_tokenizer_model("rwkv")),
            "tokenizer model rwkv unsupported, supported: gpt2, llama",
        ),
        (
            lambda path: write_gguf(path, lambda writer: None),
            "tokenizer model None unsupported",
        ),
        (lambda path: byte_level(path, "viking"), "pre-tokenizer viking unsupported, supported: "),
        (lambda path: byte_level(path, merges=["h"]), "damaged merges: 'h' is not made of tokens"),
        (
            lambda path: byte_level(path, more=lambda writer: writer.add_token_scores([1.0])),
            "damaged vocabulary: 263 tokens, 263 types, 1 scores",
        ),
        (
            lambda path: (
                byte_level(path, more=lambda writer: writer.add_unk_token_id(3))
                and sentencepiece_gguf(path, lambda writer: writer.add_unk_token_id(9999))
            ),
            "unknown_token_id is 9999, outside the vocabulary",
        ),
        (
            lambda path: write_gguf(
                path,
                lambda writer: (writer.add_tokenizer_model("llama"), writer.add_token_list(["a"])),
            ),
            "the vocabulary has no scores",
        ),
        (
            lambda path: write_gguf(path, lambda writer: writer.add_tokenizer_model("gpt2")),
            r"no array tokenizer\.ggml\.tokens",
        ),
    ],
)
def test_faults(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        convert(make(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------- child and its parent


async def test_made_once_by_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = byte_level(tmp_path / "m.gguf")
    made: list[str] = []
    path = await ensure_tokenizer(source, tmp_path / "cache", lambda: made.append("making"))
    assert Tokenizer.from_file(str(path)).encode("hell").tokens == ["hell"]
    names = sorted(entry.name for entry in path.parent.iterdir())
    assert names == [".tokenizer.json.lock", "tokenizer.json", "tokenizer.json.seal"]

    async def refuse(*args: object) -> None:
        raise AssertionError("made twice")

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_convert_in_child", refuse)
        assert await ensure_tokenizer(source, tmp_path / "cache") == path
    assert made == ["making"]
    path.write_text("{}")
    again = await ensure_tokenizer(source, tmp_path / "cache")
    assert Tokenizer.from_file(str(again)).encode("hell").tokens == ["hell"]


async def test_a_fault_of_the_child_is_one_line(tmp_path: Path) -> None:
    source = byte_level(tmp_path / "m.gguf", "viking")
    words = r"^cannot make a tokenizer\.json from .*m\.gguf: pre-tokenizer viking unsupported"
    with pytest.raises(ModelError, match=words) as caught:
        await ensure_tokenizer(source, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))


@pytest.mark.parametrize(("model_type", "taken"), [(1, False), (2, True)])
async def test_an_added_token_keeps_its_id_or_is_refused(
    tmp_path: Path, model_type: int, taken: bool
) -> None:
    """The library would give a token beyond a gap the next free id, without a word."""
    source = sentencepiece_model(tmp_path / "tokenizer.model", model_type)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<far>": 400}))
    if taken:
        path = await ensure_tokenizer(source, tmp_path / "cache")
        assert Tokenizer.from_file(str(path)).encode("hello<far>").ids[-1] == 400
    else:
        with pytest.raises(ModelError, match="token <far> cannot have the id 400"):
            await ensure_tokenizer(source, tmp_path / "cache")


async def test_cancellation_kills_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that calls this test and then waits for ever, in place of the converter."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    code = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
    killed: list[trio.Process] = []
    kill, run_process = convert_module._kill, trio.run_process

    async def record(process: trio.Process) -> None:
        killed.append(process)
        await kill(process)

    async def run_other(command: list[str], **keywords: Any) -> Any:
        return await run_process([sys.executable, "-c", code], **keywords)

    monkeypatch.setattr(convert_module, "_kill", record)
    monkeypatch.setattr(trio, "run_process", run_other)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ensure_tokenizer, byte_level(tmp_path / "m.gguf"), tmp_path / "cache")
        async with await listeners[0].accept():
            nursery.cancel_scope.cancel()
    await listeners[0].aclose()
    assert [process.returncode for process in killed] == [-9]
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == [".tokenizer.json.lock"]
    assert not list((tmp_path / "cache").rglob(".scratch"))


async def test_the_child_does_not_outlive_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the command it really gets, a child that waits for ever ends with the pipe."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    (tmp_path / "waits.py").write_text(
        f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
    )
    run_process = trio.run_process

    async def run_other(command: list[str], *, stdin: int, **keywords: Any) -> Any:
        assert command[2:5] == ["-m", "trioserve.models.lifeline", "trioserve.text.convert"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [command[0], "-m", command[3], "waits"]
        return await run_process(command, stdin=stdin, env=environment, **keywords)

    async def convert_it() -> None:
        with pytest.raises(ModelError, match="the converter ended with status 1"):
            await ensure_tokenizer(byte_level(tmp_path / "m.gguf"), tmp_path / "cache")
        ended.set()

    ended = trio.Event()
    pipes: list[tuple[int, int]] = []
    make_pipe = os.pipe
    monkeypatch.setattr(convert_module.os, "pipe", lambda: pipes.append(make_pipe()) or pipes[-1])
    monkeypatch.setattr(trio, "run_process", run_other)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(convert_it)
            async with await listeners[0].accept():
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, pipes[0][1])  # closes what the end of this process would close
                os.close(nothing)
                await ended.wait()
    await listeners[0].aclose()


def test_the_key_follows_what_goes_in(tmp_path: Path) -> None:
    first = cache_key(byte_level(tmp_path / "a.gguf"))
    renamed = byte_level(tmp_path / "b.gguf", more=lambda writer: writer.add_name("other"))
    assert cache_key(renamed) == first
    assert cache_key(byte_level(tmp_path / "c.gguf", "smollm")) != first
    model = sentencepiece_model(tmp_path / "tokenizer.model")
    before = cache_key(model)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert cache_key(model) != before


def test_the_child_imports_little(tmp_path: Path) -> None:
    source = byte_level(tmp_path / "m.gguf")
    code = (
        "import sys; from trioserve.text.convert import main; "
        f"status = main([{str(source)!r}, {str(tmp_path)!r}]); "
        "heavy = {'torch', 'numpy', 'transformers', 'gguf', 'sentencepiece'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tokenizer.json").exists()
