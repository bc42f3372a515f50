"""What a linter cannot know of this project: no task, thread or state without an owner.

Reads the sources under trioserve/ and kernels/ and prints one line for each place that
* starts a thread, except where docs/architecture.md has one, or a system task of trio,
* imports asyncio, multiprocessing, concurrent.futures or pickle,
* has a ``global`` statement,
* imports torch, transformers or numpy, at any depth, in a package of the parent process.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The worker's inbox.
MAY_START_THREADS = {"trioserve/ipc/child.py"}
BANNED_MODULES = {"asyncio", "multiprocessing", "concurrent", "pickle", "_thread"}
BANNED_CALLS = {"spawn_system_task", "start_thread_soon", "start_guest_run", "fork", "forkpty"}
TENSOR_MODULES = {"torch", "transformers", "numpy", "numba", "safetensors", "triton"}
PARENT_PACKAGES = ("cli", "config", "engine", "http", "ipc", "text")
PARENT_MODULES = {"__init__.py", "__main__.py", "errors.py", "logs.py", "main.py"}
# A one-shot child of its own, never imported by the parent.
NOT_PARENT = {"trioserve/text/convert.py"}


def faults(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and fault for everything in ``source``, the file ``name``, that has no place there."""
    for node in ast.walk(ast.parse(source, name)):
        for module in imported(node):
            top = module.partition(".")[0]
            if top in BANNED_MODULES:
                yield node.lineno, f"imports {module}"  # type: ignore[attr-defined]
            if top in TENSOR_MODULES and is_parent(name):
                yield node.lineno, f"imports {module} in the parent"  # type: ignore[attr-defined]
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        if isinstance(node, ast.Name | ast.Attribute):
            used = node.id if isinstance(node, ast.Name) else node.attr
            if used in BANNED_CALLS:
                yield node.lineno, f"uses {used}"
            if used in ("Thread", "Timer") and name not in MAY_START_THREADS:
                yield node.lineno, f"uses {used}: a thread that architecture.md does not have"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def is_parent(name: str) -> bool:
    parts = name.split("/")
    inside = parts[1] in PARENT_PACKAGES or (len(parts) == 2 and parts[1] in PARENT_MODULES)
    return parts[0] == "trioserve" and inside and name not in NOT_PARENT


def main() -> int:
    found = False
    # trioserve/kernels is a link to kernels, which is read under its own name.
    linked = ROOT / "trioserve" / "kernels"
    for folder in ("trioserve", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if linked in path.parents:
                continue
            name = path.relative_to(ROOT).as_posix()
            for line, fault in sorted(faults(name, path.read_text(encoding="utf-8"))):
                print(f"{name}:{line}: {fault}")
                found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
