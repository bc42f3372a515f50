"""docs/config.md, made from the schema: ``python -m trioserve.config.docs > docs/config.md``."""

from __future__ import annotations

import sys

from trioserve.config.convert import expected, toml_text
from trioserve.config.keys import KEYS, SECTIONS, Key

HEAD = """\
# Configuration

<!-- Made by `python -m trioserve.config.docs > docs/config.md`; do not edit by hand. -->

Every key can be given in four places. A stronger one wins:

1. a flag: `--port 9000` for the keys that have one, `--set http.port=9000` for any key;
2. an environment variable: `TRIOSERVE_HTTP__PORT=9000`, two underscores between section and key;
3. the TOML file that `trioserve run` is given;
4. the default below.

`trioserve run --print-config` prints what all of them come to, each value with its place, as a file
that can be loaded again. Secrets are left out of it.

Nothing is ignored: an unknown key, section or `TRIOSERVE_` variable, a wrong type, a value out of
range or a key written twice ends the start with exit code 2 and one line for each fault, with file
and line, before anything heavy is loaded.

Values in the file are TOML and must have the type of their key: `port = "8000"` is an error. Flags
and variables are text, read as a TOML value where that fits the type and as plain text elsewhere;
lists may be written with commas (`--set model.served_names=a,b`), and an empty text unsets a key
whose default is "not set".

Relative paths in the file are relative to the directory of the file, so that a file and its model
can move together; all others are relative to the working directory. `~` is the home directory. A
`model.source` with a scheme (`hf:`, `wheel:`, `random:`) is no path; a file whose name looks like
one is written `./hf:name`.

Sizes are bytes, or text with a unit: `2GiB` and `512 MiB` are powers of 1024, `1.5GB` of 1000.
"""


def render() -> str:
    """The page, one table per section."""
    return "\n".join([HEAD, *(_section(section) for section in KEYS)])


def _section(section: str) -> str:
    doc = (SECTIONS[section].__doc__ or "").partition(": ")[2].strip()
    rows = [_row(key) for key in KEYS[section].values()]
    head = ["| key | takes | default | what it does |", "|---|---|---|---|"]
    title = f"## `[{section}]`\n\n{doc[:1].upper()}{doc[1:]}\n"
    return "\n".join([title, *head, *rows, ""])


def _row(key: Key) -> str:
    takes = expected(key.type).replace('"', "`")
    unit = f", {_unit(key.unit)}" if key.unit else ""
    notes = " Secret: never shown." if key.secret else ""
    return f"| `{key.name}` | {takes}{unit} | {_default(key)} | {key.help}{notes} |"


def _unit(unit: str) -> str:
    return "seconds" if unit == "s" else unit


def _default(key: Key) -> str:
    return "not set" if key.default is None else f"`{toml_text(key.default)}`"


if __name__ == "__main__":
    sys.stdout.write(render())
