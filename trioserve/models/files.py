"""Reading small files of a checkpoint, with errors that say which file and where in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trioserve.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
POINTER = b"version https://git-lfs"


def refuse_odd_file(path: Path) -> None:
    """Raise ModelError unless the file is GGUF (by its magic) or named ``.safetensors``.

    Raises OSError where it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(len(POINTER))
    refuse_pointer(path, start)
    if start.startswith(b"GGUF") or path.suffix == ".safetensors":
        return
    if not start:
        raise ModelError(f"{path} is empty: expected a GGUF or safetensors file")
    if path.suffix in PICKLES:
        raise pickle_refused(path)
    raise ModelError(f"{path} is a file that is neither GGUF nor safetensors")


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raise ModelError if ``start``, the file's first bytes, is that of a git-lfs pointer."""
    if start.startswith(POINTER):
        raise ModelError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull`")


def pickle_refused(path: Path) -> ModelError:
    """The line for a checkpoint that would run code when it is read."""
    return ModelError(
        f"{path}: pickle checkpoints are refused, they can run code; convert it with "
        "transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(new_directory)"
    )


def read_error(path: Path, error: OSError) -> ModelError:
    """The line for a file of the checkpoint that the system will not give."""
    return ModelError(f"cannot read {path}: {(error.strerror or str(error)).lower()}")


def read_text(path: Path) -> str:
    """A text file of the checkpoint; ModelError if it cannot be read or is not UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error
    refuse_pointer(path, raw[: len(POINTER)])
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file of the checkpoint whose top is an object; ModelError with line and column."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ModelError(f"{path} is not valid JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise ModelError(f"{path} is not usable JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object_if_there(path: Path) -> dict[str, Any]:
    """``read_object``, or an empty one where there is no such file."""
    return read_object(path) if path.exists() else {}
