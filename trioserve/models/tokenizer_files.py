"""The tokenizer and the chat template of a checkpoint directory: found and checked, not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from trioserve.errors import ModelError
from trioserve.models.files import read_object, read_object_if_there, read_text

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"


@frozen
class TokenizerFiles:
    """What a directory says of its text side.

    ``path`` is a tokenizer.json, or a file one can be made from. ``num_ids`` is one more than the
    highest token id, 0 where that is not known yet.
    """

    path: Path
    num_ids: int
    token_ids: dict[str, int]
    bos_token: str
    eos_token: str
    chat_template: str | None


def find_tokenizer(directory: Path, override: str | None) -> TokenizerFiles:
    """Find and check the tokenizer of ``directory``, or the one that ``override`` names.

    Raises:
        ModelError: there is none, or a file of it is damaged.
    """
    path = tokenizer_path(directory, override)
    num_ids, token_ids = (0, {}) if path.name.endswith(".model") else read_token_ids(path)
    settings = read_object_if_there(directory / "tokenizer_config.json")
    special = read_object_if_there(directory / "special_tokens_map.json")

    def token(name: str) -> str:
        return _token_text(settings.get(name)) or _token_text(special.get(name))

    return TokenizerFiles(
        path=path,
        num_ids=num_ids,
        token_ids=token_ids,
        bos_token=token("bos_token"),
        eos_token=token("eos_token"),
        chat_template=find_chat_template(directory, settings),
    )


def tokenizer_path(directory: Path, override: str | None) -> Path:
    """The file the tokenizer comes from; existence is all that is checked."""
    if override is not None:
        path = Path(override).expanduser()
        if not path.is_file():
            raise ModelError(f"no such file: {path} (model.tokenizer)")
        return path
    for name in (TOKENIZER, SENTENCEPIECE):
        if (path := directory / name).exists():
            return path
    remedy = (
        "make one with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        if (directory / "vocab.json").exists()
        else "or set model.tokenizer"
    )
    raise ModelError(
        f"no tokenizer in {directory}: expected {TOKENIZER} or {SENTENCEPIECE}; {remedy}"
    )


def read_token_ids(path: Path) -> tuple[int, dict[str, int]]:
    """The number of ids and the added tokens' ids, of a tokenizer.json."""
    tokenizer = read_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        # A unigram vocabulary is a list of (token, score), others map tokens to ids.
        known = (
            len(vocabulary)
            if isinstance(vocabulary, list)
            else max(vocabulary.values(), default=-1) + 1
        )
        return max([known, *(token_id + 1 for token_id in added.values())]), added
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no tokenizer.json of the tokenizers library") from error


def find_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """The chat template, from the newest place to the oldest; None for a base model."""
    if (path := directory / "chat_template.jinja").exists():
        return read_text(path)
    if (path := directory / "chat_template.json").exists():
        return _template_text(read_object(path).get("chat_template"), path)
    return _template_text(settings.get("chat_template"), directory / "tokenizer_config.json")


def read_override(path_text: str) -> str:
    """The template file that ``model.chat_template`` names."""
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise ModelError(f"no such file: {path} (model.chat_template)")
    return read_text(path)


def _template_text(value: Any, path: Path) -> str | None:
    """A template as it may be written: a text, or a list of named ones, "default" among them."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        raise ModelError(f"{path}: chat_template is neither a text nor a list of names") from None
    return named.get("default", next(iter(named.values()), None))


def _token_text(value: Any) -> str:
    """A special token, written as text or as an object with its text in ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
