"""Where a model comes from: ``[model] source`` as text, parsed and fetched.

Four kinds: a path, ``hf:org/name@revision``, ``wheel:distribution==version#path/in/wheel`` and
``random:architecture?key=value&...``. What looks like a path is a path and never causes a network
access: a typing error in one must not turn into advice about repository names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from trioserve.config.schema import DEFAULT_SOURCE
from trioserve.errors import ModelError
from trioserve.models.cache import cache_root
from trioserve.models.files import refuse_odd_file
from trioserve.models.hub import fetch_snapshot
from trioserve.models.random_model import RandomModel, ensure_random_tokenizer, parse_random
from trioserve.models.wheel import fetch_wheel_member

Progress = Callable[[float | None, str, int | None], None]
PREFIXES = ("hf", "wheel", "random")


@frozen
class PathSource:
    """A directory or a file on this machine."""

    path: str

    @property
    def name(self) -> str:
        """The default served name."""
        return Path(self.path).expanduser().absolute().name.removesuffix(".gguf")


@frozen
class HfSource:
    """A repository of the Hugging Face hub; ``revision`` None is its main branch."""

    repository: str
    revision: str | None

    @property
    def name(self) -> str:
        """The default served name."""
        return self.repository


@frozen
class WheelSource:
    """A file inside a wheel of a package index."""

    distribution: str
    version: str
    member: str

    @property
    def name(self) -> str:
        """The default served name."""
        return Path(self.member).name.removesuffix(".gguf")


@frozen
class RandomSource:
    """A model of random weights: its architecture and the text after the question mark."""

    architecture: str
    query: str

    @property
    def name(self) -> str:
        """The default served name."""
        return f"random-{self.architecture}"


Source = PathSource | HfSource | WheelSource | RandomSource


def parse_source(text: str) -> Source:
    """The parts of a ``[model] source``. Looks whether a path of that name exists, no more.

    Raises:
        ModelError: it is empty, or has a known prefix and a wrong form.
    """
    if not text.strip():
        raise ModelError("model.source is empty: give a path, hf:…, wheel:… or random:…")
    prefix, colon, rest = text.partition(":")
    if not colon or prefix not in PREFIXES or _looks_like_path(text):
        return PathSource(text)
    return {"hf": _parse_hf, "wheel": _parse_wheel, "random": _parse_random}[prefix](rest)


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or os.path.lexists(text)


def _parse_hf(rest: str) -> HfSource:
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", rest)
    if not found:
        raise ModelError(
            f"model.source hf:{rest}: expected hf:organisation/name or …/name@revision"
        )
    return HfSource(found[1], found[2])


def _parse_wheel(rest: str) -> WheelSource:
    found = re.fullmatch(r"([A-Za-z0-9][\w.-]*)==([\w.!+-]+)#(.+)", rest)
    if not found:
        raise ModelError(
            f"model.source wheel:{rest}: expected wheel:distribution==version#path/in/wheel, "
            f"as in {DEFAULT_SOURCE}"
        )
    if found[3].startswith("/") or {"", ".", ".."} & set(found[3].split("/")):
        raise ModelError(f"model.source wheel:{rest}: {found[3]} is no path inside a wheel")
    return WheelSource(found[1], found[2], found[3])


def _parse_random(rest: str) -> RandomSource:
    architecture, _, query = rest.partition("?")
    parse_random(architecture, query)
    return RandomSource(architecture, query)


async def fetch(
    source: Source, *, cache_dir: str | None, hf_token: str | None, progress: Progress
) -> Path | RandomModel:
    """Bring the model to this machine and say where it lies: a file or a directory.

    A path is only looked at. Cancellation ends the child that downloads and leaves in the cache
    either a whole, sealed file or none.

    Args:
        cache_dir: as ``[model] cache_dir``; None for the default.
        hf_token: access token for ``hf:`` sources.
        progress: takes a fraction 0..1 where it is known, a word on what is done, and bytes.

    Raises:
        ModelError: it cannot be had; one line with the place and the remedy.
    """
    root = cache_root(cache_dir)
    match source:
        case PathSource(path):
            return check_path(path)
        case HfSource(repository, revision):
            return await fetch_snapshot(repository, revision, hf_token, progress)
        case WheelSource(distribution, version, member):
            return await fetch_wheel_member(distribution, version, member, root, progress)
        case RandomSource(architecture, query):
            model = parse_random(architecture, query)
            return await ensure_random_tokenizer(model, root)


def check_path(text: str) -> Path:
    """``text`` as the path of a model that can be read. A few system calls, no network.

    Raises:
        ModelError: nothing is there, it cannot be read, it is empty, or no model.
    """
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            if not any(path.iterdir()):
                raise ModelError(f"{path} is empty: expected a model's files in it")
        elif path.exists():
            refuse_odd_file(path)
        else:
            raise ModelError(f"no such directory: {path}{_hint(text)}")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ModelError(f"cannot read {path}: {reason}") from error
    return path


def _hint(text: str) -> str:
    """What may have been meant by a path that does not exist."""
    prefix, colon, rest = text.partition(":")
    if colon and prefix.strip().lower() in PREFIXES:
        return f"; did you mean {prefix.strip().lower()}:{rest.strip()}?"
    if colon and re.fullmatch(r"[a-z_]+", prefix):
        return f"; known prefixes are {', '.join(f'{known}:' for known in PREFIXES)}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text):
        return f"; for a repository of the hub write hf:{text}"
    return ""
