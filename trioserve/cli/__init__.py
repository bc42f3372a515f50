"""The command line: ``trioserve SUBCOMMAND``.

Each subcommand is a module of this package, imported only when it is called or asked for help, and
each imports what it works with inside its function: ``--version`` and ``--help`` load click and
nothing else that is not in the standard library.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from trioserve import __version__

# Name of the subcommand, which is the name of its module and of the function in it, and the line
# it has in `trioserve --help`.
SUBCOMMANDS = {
    "run": "Serve a model over HTTP with the OpenAI API.",
    "top": "Watch a running server: stages, requests, cache, rates, latencies.",
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        command = getattr(importlib.import_module(f"trioserve.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUBCOMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trioserve", message="%(prog)s %(version)s")
def cli() -> None:
    """A server for large language models: ready in seconds, clear when it fails, nothing left
    behind.

    Exit codes: 0 drained, 2 configuration or command line, 3 address, 4 worker never answered,
    5 a start-up stage failed, 6 the engine died while serving, 7 the drain deadline cut streams,
    70 a bug in trioserve, 128+n ended by the second signal n.
    """


def fill_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed.

    The next descriptor would take its number, and what is said on stderr would go into a client's
    connection.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(args: list[str] | None = None) -> Any:
    """Entry point of the ``trioserve`` program. Ends the process with the exit codes above."""
    fill_standard_streams()
    cli.main(args=args, prog_name="trioserve")
