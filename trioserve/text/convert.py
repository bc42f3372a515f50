"""A tokenizer.json for checkpoints that have none, made once per machine by a one-shot child.

``python -P -m trioserve.text.convert SOURCE OUT_DIR`` reads a GGUF file's metadata or a
sentencepiece ``tokenizer.model`` and writes ``OUT_DIR/tokenizer.json``; on failure its last line
on stderr says why. ``ensure_tokenizer`` is the parent's side: it runs the child under a lock and
keeps the result in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from trioserve.errors import ModelError
from trioserve.models import cache

# Part of the cache key: raise it with every change of what the child writes.
CONVERTER_VERSION = 1
# Files beside a sentencepiece model that have a say in its tokenizer.json.
COMPANIONS = ("tokenizer_config.json", "added_tokens.json")


async def ensure_tokenizer(
    source: Path, root: Path, making: Callable[[], None] = lambda: None
) -> Path:
    """The tokenizer.json made from ``source``, from the cache at ``root`` or made now.

    Args:
        source: a GGUF file, or a sentencepiece model named ``*.model``.
        root: the cache's directory, see ``trioserve.models.cache.cache_root``.
        making: called if it was not in the cache, before it is made or waited for.

    Cancellation kills the child and leaves nothing of its work.

    Raises:
        ModelError: the source's tokenizer is of a kind that is not supported, or damaged; or the
            cache cannot be written.
    """
    key = await trio.to_thread.run_sync(cache_key, source, abandon_on_cancel=True)
    target = root / "tokenizers" / key / "tokenizer.json"
    if await trio.to_thread.run_sync(cache.is_intact, target, abandon_on_cancel=True):
        return target
    making()
    try:
        async with cache.locked(target):
            if not await trio.to_thread.run_sync(cache.is_intact, target, abandon_on_cancel=True):
                await _convert_in_child(source, target)
    except OSError as error:
        raise cache.write_error(root, error) from error
    return target


def cache_key(source: Path) -> str:
    """A name for what will be made: digest of all that goes into it, and the converter's version.

    Raises:
        ModelError: the source cannot be read.
    """
    from trioserve.models.files import read_error
    from trioserve.models.gguf_header import read_header

    if source.suffix != ".model":
        return f"{read_header(source).digest('tokenizer.')[:32]}-v{CONVERTER_VERSION}"
    digest = hashlib.sha256()
    try:
        for path in (source, *(source.with_name(name) for name in COMPANIONS)):
            content = path.read_bytes() if path == source or path.exists() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
    except OSError as error:
        raise read_error(path, error) from error
    return f"{digest.hexdigest()[:32]}-v{CONVERTER_VERSION}"


async def _convert_in_child(source: Path, target: Path) -> None:
    """Run the child in a scratch directory and publish what it made. Under the lock."""
    scratch = target.with_name(".scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "trioserve.models.lifeline", "trioserve.text.convert"]
    command += [str(source), str(scratch)]
    # The lifeline's end here closes with us, however we end; nothing is ever written to it.
    lifeline, held = os.pipe()
    try:
        done = await trio.run_process(
            command,
            stdin=lifeline,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            start_new_session=True,  # a Ctrl-C is for us to heed, and then we end it
            deliver_cancel=_kill,
        )
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            cause = lines[-1] if lines else f"the converter ended with status {done.returncode}"
            raise ModelError(f"cannot make a tokenizer.json from {source}: {cause}")
        await trio.to_thread.run_sync(partial(cache.publish, scratch / "tokenizer.json", target))
    finally:
        os.close(lifeline)
        os.close(held)
        shutil.rmtree(scratch, ignore_errors=True)


async def _kill(process: trio.Process) -> None:
    process.kill()


# ------------------------------------------------------------------------------- in the child


def convert(source: Path) -> dict[str, Any]:
    """The object of a tokenizer.json for ``source``.

    Raises:
        ModelError: it is of a kind that is not supported, or damaged.
    """
    if source.suffix == ".model":
        from trioserve.text.convert_sentencepiece import from_sentencepiece

        return from_sentencepiece(source)
    from trioserve.models.gguf_header import read_header
    from trioserve.text.convert_gguf import from_gguf

    return from_gguf(read_header(source))


def main(arguments: list[str]) -> int:
    """Write ``OUT_DIR/tokenizer.json``; 0, or 1 with the cause on stderr."""
    from tokenizers import Tokenizer

    source, out_dir = Path(arguments[0]), Path(arguments[1])
    try:
        made = convert(source)
        # The library has the last word on whether it can be read, and as what.
        tokenizer = Tokenizer.from_str(json.dumps(made, ensure_ascii=False))
        for token in made["added_tokens"]:
            if tokenizer.token_to_id(token["content"]) != token["id"]:
                raise ModelError(f"token {token['content']} cannot have the id {token['id']}")
    except Exception as error:
        # Own errors are one line already; the library raises bare Exceptions.
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
