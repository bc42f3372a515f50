"""Parts of a tokenizer.json, as the ``tokenizers`` library reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Object = dict[str, Any]
SPACE = "\u2581"  # how sentencepiece writes a space


def tokenizer_object(
    model: Object,
    added_tokens: Sequence[Object],
    *,
    normalizer: Object | None,
    pre_tokenizer: Object | None,
    post_processor: Object | None,
    decoder: Object | None,
) -> Object:
    """The whole file."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added_tokens, key=lambda token: int(token["id"])),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }


def added_token(token_id: int, content: str, *, special: bool, **flags: bool) -> Object:
    """A token that is matched as a whole before anything else; ``special``: left out of text."""
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


def bpe_model(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Object:
    """A BPE model. ``ignore_merges``: a piece that is a token is taken whole."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk_token is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocabulary),
        "merges": [list(pair) for pair in merges],
    }


def template(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> Object | None:
    """A post-processor that puts ``bos`` before and ``eos`` after a text; None for neither."""
    if bos is None and eos is None:
        return None

    def wrap(sequence: str, type_id: int) -> list[Object]:
        parts: list[Object] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if bos is not None:
            parts.insert(0, {"SpecialToken": {"id": bos[0], "type_id": type_id}})
        if eos is not None:
            parts.append({"SpecialToken": {"id": eos[0], "type_id": type_id}})
        return parts

    known = [token for token in (bos, eos) if token is not None]
    return {
        "type": "TemplateProcessing",
        "single": wrap("A", 0),
        "pair": [*wrap("A", 0), *wrap("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in known
        },
    }


def sequence(kind: str, *parts: Object) -> Object:
    """Several steps as one; ``kind`` is "normalizers", "pretokenizers" or "decoders"."""
    return {"type": "Sequence", kind: list(parts)}


def replace(pattern: str, content: str) -> Object:
    """A normalizer or decoder that replaces a fixed text."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def split(regex: str) -> Object:
    """A pre-tokenizer: each match is a piece of its own, and so is what lies between."""
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def byte_level(*, use_regex: bool) -> Object:
    """Bytes to characters, as GPT-2 does; ``use_regex`` splits by its pattern first."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def sentencepiece_normalizer(*, add_prefix: bool, first: Object | None = None) -> Object:
    """Spaces as sentencepiece writes them, one more at the start of each text between specials."""
    steps = [first] if first else []
    if add_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return sequence("normalizers", *steps, replace(" ", SPACE))


def sentencepiece_decoder(*, add_prefix: bool) -> Object:
    """The way back: spaces, bytes written as tokens, and the first space taken off."""
    steps = [replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if add_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return sequence("decoders", *steps)


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE, best first.

    It has none of its own: whichever two neighbours make the token of the highest score are
    merged. So every way to cut a token in two tokens is a merge, ranked by the token's score.
    """
    ranked = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                ranked.append((-score, left, right))
    ranked.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in ranked]
