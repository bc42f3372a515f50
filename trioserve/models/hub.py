"""``hf:`` sources: a repository of the Hugging Face hub, fetched by a one-shot child.

The library downloads with threads and native code that cannot be told to stop; a process can. The
child keeps the hub's own cache, which is shared with other programs, and its offline switches.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from trioserve.errors import ModelError

Progress = Callable[[float | None, str, int | None], None]


async def fetch_snapshot(
    repository: str, revision: str | None, token: str | None, progress: Progress
) -> Path:
    """The directory of one revision, with safetensors, JSON, tokenizer and template files only.

    Cancellation kills the child; what it had of a file stays in the hub's cache, to be resumed.

    Raises:
        ModelError: it cannot be had; names the repository and the cause.
    """
    what = f"hf:{repository}" + (f"@{revision}" if revision else "")
    progress(None, f"asking for {what}", None)
    command = [sys.executable, "-P", "-m", "trioserve.models.hub_child"]
    # The token goes through a pipe: arguments and environment are there for others to read.
    request = json.dumps({"repository": repository, "revision": revision, "token": token})
    answers: list[dict[str, object]] = []
    errors = bytearray()
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                check=False,
                start_new_session=True,  # a Ctrl-C is for us to heed, and then we end it
                deliver_cancel=_kill,
            )
        )
        nursery.start_soon(_ask, process.stdin, request)
        nursery.start_soon(_read_answers, process.stdout, what, answers, progress)
        nursery.start_soon(_read_all, process.stderr, errors)
    return _outcome(what, answers, bytes(errors), process.returncode)


def _outcome(
    what: str, answers: list[dict[str, object]], errors: bytes, returncode: int | None
) -> Path:
    last = answers[-1] if answers else {}
    if returncode == 0 and "path" in last:
        return Path(str(last["path"]))
    if "error" in last:
        raise ModelError(f"cannot fetch {what}: {last['error']}")
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    cause = lines[-1].strip() if lines else f"the download ended with status {returncode}"
    raise ModelError(f"cannot fetch {what}: {cause}")


async def _ask(stream: trio.abc.SendStream, request: str) -> None:
    """One line; the stream stays open, for it is the child's lifeline too."""
    with contextlib.suppress(trio.BrokenResourceError):  # a child that died has said why
        await stream.send_all(request.encode() + b"\n")


async def _kill(process: trio.Process) -> None:
    process.kill()


async def _read_answers(
    stream: trio.abc.ReceiveStream,
    what: str,
    answers: list[dict[str, object]],
    progress: Progress,
) -> None:
    """Turn the child's lines into progress; its last one is the outcome."""
    buffer = b""
    async for chunk in stream:
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            try:
                answer = json.loads(line)
            except ValueError:  # some library's print
                continue
            if not isinstance(answer, dict):
                continue
            if "num_bytes" in answer:
                total, done = answer["total_bytes"], answer["num_bytes"]
                progress(min(done / total, 1.0) if total else None, f"fetching {what}", done)
            else:
                answers.append(answer)


async def _read_all(stream: trio.abc.ReceiveStream, into: bytearray) -> None:
    async for chunk in stream:
        into.extend(chunk)
