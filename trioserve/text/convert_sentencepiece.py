"""A sentencepiece ``tokenizer.model`` → the object of a tokenizer.json.

The file is one protocol buffer. A few of its fields are needed, so they are read here.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import field, frozen

from trioserve.errors import ModelError
from trioserve.models.files import read_error, read_object_if_there, refuse_pointer
from trioserve.text.tokenizer_json import (
    Object,
    added_token,
    bpe_model,
    merges_from_scores,
    sentencepiece_decoder,
    sentencepiece_normalizer,
    sequence,
    template,
    tokenizer_object,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


@frozen
class Piece:
    """One token of the model."""

    text: str
    score: float
    kind: int


@frozen
class SentencePiece:
    """What is needed of the model. A token id beyond the pieces stands for none."""

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes = field(repr=False)
    add_prefix: bool
    collapse_spaces: bool


def from_sentencepiece(path: Path) -> Object:
    """The tokenizer of the model at ``path``, with what the files beside it add.

    ``add_bos_token`` (true if unsaid), ``add_eos_token`` and the added tokens come from
    ``tokenizer_config.json`` and ``added_tokens.json``.

    Raises:
        ModelError: not a sentencepiece model, or one that cuts text by words or characters.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error
    refuse_pointer(path, raw)
    try:
        model = parse(raw)
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise ModelError(f"{path.name} is no sentencepiece model: {error}") from error
    if model.model_type not in (UNIGRAM, BPE) or not model.pieces:
        raise ModelError(f"{path.name}: only sentencepiece models of kind bpe and unigram are read")
    if not 0 <= model.unk_id < len(model.pieces):
        raise ModelError(f"{path.name} has no unknown token")
    settings = read_object_if_there(path.with_name("tokenizer_config.json"))
    added = _added_tokens(model, settings, path)
    first = sequence("normalizers", *_first_steps(model)) if _first_steps(model) else None
    return tokenizer_object(
        _model(model, added),
        added,
        normalizer=sentencepiece_normalizer(add_prefix=model.add_prefix, first=first),
        pre_tokenizer=None,
        post_processor=template(
            _token(model, model.bos_id, settings.get("add_bos_token", True)),
            _token(model, model.eos_id, settings.get("add_eos_token", False)),
        ),
        decoder=sentencepiece_decoder(add_prefix=model.add_prefix),
    )


def _first_steps(model: SentencePiece) -> list[Object]:
    steps: list[Object] = []
    if model.charsmap:
        encoded = base64.b64encode(model.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if model.collapse_spaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _model(model: SentencePiece, added: list[Object]) -> Object:
    if model.model_type == UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": model.unk_id,
            "vocab": [[piece.text, piece.score] for piece in model.pieces],
            "byte_fallback": model.byte_fallback,
        }
    ids: dict[str, int] = {}
    for token_id, piece in enumerate(model.pieces):
        ids.setdefault(piece.text, token_id)
    for token in added:  # in the vocabulary it keeps its id; outside it would get the next free one
        ids.setdefault(token["content"], token["id"])
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
    return bpe_model(
        ids,
        merges_from_scores(scores),
        unk_token=model.pieces[model.unk_id].text,
        byte_fallback=model.byte_fallback,
    )


def _token(model: SentencePiece, token_id: int, wanted: Any) -> tuple[str, int] | None:
    if not wanted or not 0 <= token_id < len(model.pieces):
        return None
    return model.pieces[token_id].text, token_id


def _added_tokens(model: SentencePiece, settings: dict[str, Any], path: Path) -> list[Object]:
    """Control and user-defined pieces, then those that the files beside the model add."""
    tokens = {
        token_id: added_token(token_id, piece.text, special=piece.kind != USER_DEFINED)
        for token_id, piece in enumerate(model.pieces)
        if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    for text, token_id in read_object_if_there(path.with_name("added_tokens.json")).items():
        tokens.setdefault(token_id, added_token(token_id, text, special=False))
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        for key, entry in decoder.items():
            flags = {
                name: bool(entry.get(name, False))
                for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            tokens[int(key)] = added_token(
                int(key), str(entry["content"]), special=bool(entry.get("special")), **flags
            )
    except (AttributeError, KeyError, ValueError) as error:
        raise ModelError("tokenizer_config.json: added_tokens_decoder is malformed") from error
    return list(tokens.values())


def parse(raw: bytes) -> SentencePiece:
    """Read the model; numbers are those of sentencepiece's own schema.

    Raises:
        ValueError, IndexError, KeyError, struct.error: the bytes are something else.
    """
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(raw):
        if number == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append(Piece(entry[1].decode(), score, entry.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return SentencePiece(
        pieces=tuple(pieces),
        model_type=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        unk_id=trainer.get(40, 0),
        bos_id=trainer.get(41, 1),
        eos_id=trainer.get(42, 2),
        charsmap=normalizer.get(2, b""),
        add_prefix=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
    )


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or the bytes of anything else."""
    offset = 0
    while offset < len(raw):
        tag, offset = _varint(raw, offset)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, offset = _varint(raw, offset)
            yield number, value
            continue
        if wire == 2:
            length, offset = _varint(raw, offset)
        else:
            length = {1: 8, 5: 4}[wire]
        if offset + length > len(raw):
            raise ValueError("it ends within a field")
        yield number, raw[offset : offset + length]
        offset += length


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError("a number that does not end")
