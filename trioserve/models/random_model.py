"""``random:`` sources: a model of random weights, for benches and tests.

``random:llama?num_layers=4&hidden_size=256&seed=1`` sets any field of ``ModelSpec`` by its name;
of the nested ones, ``rope_scaling.kind=linear&rope_scaling.factor=2``. The tokenizer is made for
the vocabulary size asked for: three control tokens, the 256 bytes, then letter sequences.
"""

from __future__ import annotations

import difflib
import itertools
import json
import types
import typing
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import trio
from attrs import frozen

from trioserve.errors import ModelError
from trioserve.models import cache
from trioserve.models.spec import ModelSpec, RopeScaling
from trioserve.models.spec_checks import check_spec

ARCHITECTURES = ("llama",)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN, EOS_TOKEN = CONTROL_TOKENS[0], CONTROL_TOKENS[2]
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
SPACE = "Ġ"  # how a byte-level vocabulary writes a leading space
MIN_VOCABULARY = len(CONTROL_TOKENS) + 256
MAX_VOCABULARY = MIN_VOCABULARY + 27 * 26 + 27 * 26**2 + 27 * 26**3
TOKENIZER_VERSION = 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position": 2048,
    "bos_token_id": 0,
    "eos_token_ids": (2,),
}


@frozen
class RandomModel:
    """A model that exists only as its shape and a seed. ``tokenizer_path`` is set when fetched."""

    spec: ModelSpec
    seed: int
    tokenizer_path: Path = Path()


def parse_random(architecture: str, query: str) -> RandomModel:
    """The model behind ``random:architecture?query``, its tokenizer not yet made.

    Raises:
        ModelError: an unknown architecture, an unknown key, a value of the wrong type.
    """
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"random:{architecture}: architecture {architecture or 'missing'} unsupported, "
            f"supported: {supported}"
        )
    values: dict[str, Any] = dict(DEFAULTS)
    scaling: dict[str, Any] = {}
    seed = 0
    for key, text in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if key == "seed":
            seed = _convert(key, int, text)
        elif key.startswith("rope_scaling."):
            field = key.removeprefix("rope_scaling.")
            scaling[field] = _convert(key, _field_type(RopeScaling, field, key), text)
        else:
            values[key] = _convert(key, _field_type(ModelSpec, key, key), text)
    values.setdefault("head_dim", max(values["hidden_size"] // max(values["num_heads"], 1), 1))
    if scaling:
        if not {"kind", "factor"} <= scaling.keys():
            raise ModelError("random: rope_scaling needs rope_scaling.kind and .factor")
        values["rope_scaling"] = RopeScaling(**scaling)
    spec = ModelSpec(architecture=architecture, **values)
    check_spec(spec, f"random:{architecture}")
    if not MIN_VOCABULARY <= spec.vocab_size <= MAX_VOCABULARY:
        raise ModelError(
            f"random:{architecture}: vocab_size is {spec.vocab_size}, must be "
            f"{MIN_VOCABULARY} to {MAX_VOCABULARY}"
        )
    return RandomModel(spec, seed)


def _field_type(cls: type, field: str, key: str) -> Any:
    hints = typing.get_type_hints(cls)
    hints.pop("architecture", None)
    hints.pop("rope_scaling", None)
    if field in hints:
        return hints[field]
    names = [*typing.get_type_hints(ModelSpec), "seed"]
    names += [f"rope_scaling.{a.name}" for a in attrs.fields(RopeScaling)]
    names = [name for name in names if name not in ("architecture", "rope_scaling")]
    near = difflib.get_close_matches(key, names, 1, 0.5)
    remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(names))}"
    raise ModelError(f"random: unknown key {key}; {remedy}")


def _convert(key: str, kind: Any, text: str) -> Any:
    """``text`` as a value of the annotated type ``kind``."""
    try:
        origin = typing.get_origin(kind)
        if origin is tuple:
            (item, *_) = typing.get_args(kind)
            return tuple(item(part) for part in text.split(",") if part)
        if origin is typing.Literal:
            if text not in typing.get_args(kind):
                raise ValueError(text)
            return text
        if origin in (types.UnionType, typing.Union):  # only "int | None" is left
            return None if text == "none" else int(text)
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        name = getattr(kind, "__name__", str(kind))
        raise ModelError(f"random: {key}={text} is not a value of type {name}") from None


async def ensure_random_tokenizer(model: RandomModel, root: Path) -> RandomModel:
    """The model with its tokenizer.json in the cache, made now if it was not there.

    Cancellation leaves a whole file or none.

    Raises:
        ModelError: the cache cannot be written.
    """
    name = f"tokenizer-{model.spec.vocab_size}-v{TOKENIZER_VERSION}.json"
    target = root / "random" / name
    if not await trio.to_thread.run_sync(cache.is_intact, target, abandon_on_cancel=True):
        try:
            async with cache.locked(target):
                await trio.to_thread.run_sync(_write_tokenizer, model.spec.vocab_size, target)
        except OSError as error:
            raise cache.write_error(root, error) from error
    return attrs.evolve(model, tokenizer_path=target)


def _write_tokenizer(vocab_size: int, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    temporary.write_text(json.dumps(make_tokenizer(vocab_size), ensure_ascii=False))
    cache.publish(temporary, target)


def make_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE of exactly ``vocab_size`` tokens, as the object of a tokenizer.json."""
    merges = list(itertools.islice(_merges(), vocab_size - MIN_VOCABULARY))
    tokens = [*CONTROL_TOKENS, *byte_alphabet(), *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, token in enumerate(CONTROL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge: words of two letters, then three, then four; each made of known parts."""
    stems = [SPACE, *LETTERS]
    for _ in range(3):
        words = []
        for stem, letter in itertools.product(stems, LETTERS):
            yield stem, letter
            words.append(stem + letter)
        stems = words


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, by byte, in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the others are moved up, in order, to 256
    and on, so that no token holds a space or a control character.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]
