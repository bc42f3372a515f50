"""GGUF metadata → the object of a tokenizer.json."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from trioserve.errors import ModelError
from trioserve.models.gguf_header import GGUFArray, GGUFHeader
from trioserve.text.tokenizer_json import (
    Object,
    added_token,
    bpe_model,
    byte_level,
    merges_from_scores,
    sentencepiece_decoder,
    sentencepiece_normalizer,
    sequence,
    split,
    template,
    tokenizer_object,
)

# Kinds of token, as token_type counts them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


@frozen
class Style:
    """How a family of byte-level vocabularies cuts text into pieces before it merges."""

    pieces: tuple[Object, ...]
    add_bos: bool = False
    ignore_merges: bool = False
    normalizer: Object | None = None


_DIGITS: Object = {"type": "Digits", "individual_digits": True}
_BYTES = byte_level(use_regex=False)
GPT2 = Style((byte_level(use_regex=True),))
DIGITS = Style((_DIGITS, byte_level(use_regex=True)))
_LLAMA3 = (split(rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"), _BYTES)
LLAMA3 = Style(_LLAMA3, add_bos=True, ignore_merges=True)
DBRX = Style(_LLAMA3)
_QWEN2 = (split(rf"{_ENGLISH}|{_WORD}|\p{{N}}|{_REST}"), _BYTES)
QWEN2 = Style(_QWEN2, normalizer={"type": "NFC"})
STABLELM2 = Style(_QWEN2)
TEKKEN = Style(
    (
        split(
            rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        _BYTES,
    ),
    add_bos=True,
    ignore_merges=True,
)
DEFAULT = Style(
    (
        split(r"[\p{P}\$\+<=>\^~\|]+"),
        split(_GPT2),
        split(r"\p{N}+"),
        split(r"[0-9][0-9][0-9]"),
        _BYTES,
    )
)
STYLES = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "stablelm2": STABLELM2,
    "tekken": TEKKEN,
}


@frozen
class Vocabulary:
    """The token table of a file, checked: ``tokens``, ``types`` and ``scores`` by id."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]

    def ids(self) -> dict[str, int]:
        """Token → id; of equal texts the first counts."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            ids.setdefault(token, token_id)
        return ids

    def added(self) -> list[Object]:
        """The tokens that are matched whole: control ones, left out of text, and the user's."""
        ids = self.ids()
        return [
            added_token(token_id, token, special=kind != USER_DEFINED)
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token and ids[token] == token_id
        ]


def from_gguf(header: GGUFHeader) -> Object:
    """The tokenizer that the metadata describes, with its bos and eos habits.

    Raises:
        ModelError: a kind of tokenizer that is not supported, or a table that does not fit.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level_bpe(header)
    if kind == "llama":
        return _sentencepiece_bpe(header)
    raise ModelError(f"tokenizer model {kind} unsupported, supported: gpt2, llama")


def _byte_level_bpe(header: GGUFHeader) -> Object:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    style = STYLES.get(name)
    if style is None:
        raise ModelError(f"pre-tokenizer {name} unsupported, supported: {', '.join(STYLES)}")
    vocabulary = _vocabulary(header)
    ids = vocabulary.ids()
    merges = [_merge(text, ids) for text in _array(header, "merges")]
    return tokenizer_object(
        bpe_model(ids, merges, ignore_merges=style.ignore_merges),
        vocabulary.added(),
        normalizer=style.normalizer,
        pre_tokenizer=(
            style.pieces[0] if len(style.pieces) == 1 else sequence("pretokenizers", *style.pieces)
        ),
        post_processor=_template(header, vocabulary, style.add_bos, None, None),
        decoder=byte_level(use_regex=True),
    )


def _sentencepiece_bpe(header: GGUFHeader) -> Object:
    vocabulary = _vocabulary(header)
    ids = vocabulary.ids()
    scores = {
        token: score
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
        if kind == NORMAL
    }
    unknown = _token_id(header, "unknown_token_id", 0)
    add_prefix = _flag(header, "add_space_prefix", True)
    return tokenizer_object(
        bpe_model(
            ids,
            merges_from_scores(scores),
            unk_token=vocabulary.tokens[unknown] if unknown is not None else None,
            byte_fallback=BYTE in vocabulary.types,
        ),
        vocabulary.added(),
        normalizer=sentencepiece_normalizer(add_prefix=add_prefix),
        pre_tokenizer=None,
        post_processor=_template(header, vocabulary, True, 1, 2),
        decoder=sentencepiece_decoder(add_prefix=add_prefix),
    )


def _vocabulary(header: GGUFHeader) -> Vocabulary:
    tokens = tuple(_array(header, "tokens"))
    types = tuple(_array(header, "token_type", (NORMAL,) * len(tokens)))
    scores = tuple(_array(header, "scores", (0.0,) * len(tokens)))
    if header.metadata.get("tokenizer.ggml.model") == "llama" and not any(scores):
        raise ModelError("the vocabulary has no scores (key tokenizer.ggml.scores)")
    if not len(tokens) == len(types) == len(scores):
        raise ModelError(
            f"damaged vocabulary: {len(tokens)} tokens, {len(types)} types, {len(scores)} scores"
        )
    return Vocabulary(tokens, types, scores)


def _array(header: GGUFHeader, name: str, default: tuple[Any, ...] | None = None) -> Any:
    value = header.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, (GGUFArray, tuple)):
        raise ModelError(f"the metadata has no array tokenizer.ggml.{name}")
    return value


def _merge(text: str, ids: dict[str, int]) -> tuple[str, str]:
    # The first character may itself be a space in old files.
    cut = text.find(" ", 1)
    left, right = text[:cut], text[cut + 1 :]
    if cut < 0 or not {left, right, left + right} <= ids.keys():
        raise ModelError(f"damaged merges: {text!r} is not made of tokens")
    return left, right


def _flag(header: GGUFHeader, name: str, default: bool) -> bool:
    return bool(header.metadata.get(f"tokenizer.ggml.{name}", default))


def _token_id(header: GGUFHeader, name: str, default: int | None) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{name}", default)
    size = len(_array(header, "tokens"))
    if value is not None and not 0 <= value < size:
        raise ModelError(f"tokenizer.ggml.{name} is {value}, outside the vocabulary of {size}")
    return None if value is None else int(value)


def _template(
    header: GGUFHeader,
    vocabulary: Vocabulary,
    add_bos: bool,
    bos_default: int | None,
    eos_default: int | None,
) -> Object | None:
    def token(name: str, add: bool, default: int | None) -> tuple[str, int] | None:
        token_id = _token_id(header, f"{name}_token_id", default)
        if not _flag(header, f"add_{name}_token", add) or token_id is None:
            return None
        return vocabulary.tokens[token_id], token_id

    return template(token("bos", add_bos, bos_default), token("eos", False, eos_default))
