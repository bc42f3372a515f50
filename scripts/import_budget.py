"""What may be imported where: the command line's help, the parent process, the worker.

Each budget is tried in an interpreter of its own; one line for each module over it, with the module
of ours whose import brought it.
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TENSORS = {"torch", "transformers", "numpy", "numba", "safetensors", "triton", "gguf"}
# Only some starts need these, so the functions that do import them.
ON_DEMAND = {"huggingface_hub", "tokenizers", "rich"}
SERVER = {"trio", "hypercorn", "quart", "quart_trio", "transformers", "huggingface_hub"}

PARENT = ("cli", "config", "engine", "http", "ipc", "text", "top")
PARENT_MODELS = ("inspect", "source", "spec", "safetensors_header", "gguf_header")
WORKER = ("core", "devices", "ipc.child")
# Programs of their own, each a one-shot child.
PROGRAMS = {"trioserve.text.convert"}

# Prints, for each module named on stdin and imported in turn, the top-level modules it added.
IMPORTER = """
import importlib, json, sys
added, seen = {}, set(sys.modules)
for name in json.load(sys.stdin):
    importlib.import_module(name)
    added[name] = sorted({m.partition(".")[0] for m in set(sys.modules) - seen})
    seen = set(sys.modules)
json.dump(added, sys.stdout)
"""
# Runs the command line and prints, on the last line, the top-level modules it imported.
HELPER = """
import json, sys
before = set(sys.modules)
from trioserve.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before})))
"""


def modules_of(*names: str) -> list[str]:
    """The modules and packages ``trioserve.<name>`` that exist, and all modules below them."""
    found: list[str] = []
    for name in names:
        path = ROOT.joinpath("trioserve", *name.split("."))
        dotted = f"trioserve.{name}"
        if path.with_suffix(".py").exists():
            found.append(dotted)
        elif path.is_dir():
            found.append(dotted)
            found += [m.name for m in pkgutil.walk_packages([str(path)], f"{dotted}.")]
    return [name for name in found if not name.endswith("__main__") and name not in PROGRAMS]


def over_budget(modules: list[str], banned: set[str]) -> list[str]:
    """One line for each module of ours that brings a banned one, also through others."""
    added = json.loads(python(IMPORTER, stdin=json.dumps(modules)))
    return [
        f"importing {ours} imports {', '.join(bad)}"
        for ours, names in added.items()
        if (bad := sorted(banned.intersection(names)))
    ]


def help_over_budget(*args: str) -> list[str]:
    """One line if ``trioserve ARGS`` imports more than the standard library and click."""
    names = json.loads(python(HELPER, *args).splitlines()[-1])
    extra = set(names) - sys.stdlib_module_names - {"trioserve", "click"}
    extra |= {"asyncio", "tomllib"}.intersection(names)
    command = " ".join(args)
    return [f"trioserve {command} imports {', '.join(sorted(extra))}"] if extra else []


def python(program: str, *args: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        input=stdin,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"import budget: exit {done.returncode} of the interpreter asked")
    return done.stdout


def main() -> int:
    parent = modules_of(*PARENT, *(f"models.{name}" for name in PARENT_MODELS), "main")
    problems: Iterable[str] = [
        *help_over_budget("--version"),
        *help_over_budget("--help"),
        *help_over_budget("run", "--help"),
        *help_over_budget("top", "--help"),
        *over_budget(parent, TENSORS | ON_DEMAND),
        *over_budget(modules_of(*WORKER), SERVER),
    ]
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
