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

MAY_START_THREADS = {
    "trioserve/ipc/child.py",  # the worker's inbox
    "trioserve/models/lifeline.py",  # one-shot children only: ends them with their parent
    "trioserve/models/weights.py",  # loads layers side by side and waits for all of them
}
THREAD_MODULES = {"concurrent", "_thread"}
BANNED_MODULES = {"asyncio", "multiprocessing", "pickle"}
THREAD_NAMES = {"Thread", "Timer"}
BANNED_NAMES = {"spawn_system_task", "start_thread_soon", "start_guest_run", "fork", "forkpty"}
TENSOR_MODULES = {"torch", "transformers", "numpy", "numba", "safetensors", "triton"}
PARENT_PACKAGES = ("cli", "config", "engine", "http", "ipc", "text", "top")
PARENT_MODULES = {
    *("__init__.py", "__main__.py", "errors.py", "logs.py", "main.py"),
    *("loop_watch.py", "notify.py", "progress.py", "rates.py"),
}
# A one-shot child of its own, never imported by the parent.
NOT_PARENT = {"trioserve/text/convert.py"}


def faults(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and fault for everything in ``source``, the file ``name``, that has no place there."""
    for node in ast.walk(ast.parse(source, name)):
        for module in imported(node):
            top = module.partition(".")[0]
            threads = top in THREAD_MODULES and name not in MAY_START_THREADS
            if top in BANNED_MODULES or threads:
                yield node.lineno, f"imports {module}"  # type: ignore[attr-defined]
            if top in TENSOR_MODULES and is_parent(name):
                yield node.lineno, f"imports {module} in the parent"  # type: ignore[attr-defined]
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        for used, line in names(node):
            if used in BANNED_NAMES:
                yield line, f"uses {used}"
            if used in THREAD_NAMES and name not in MAY_START_THREADS:
                yield line, f"uses {used}: a thread that architecture.md does not have"


def names(node: ast.AST) -> list[tuple[str, int]]:
    """What a name, an attribute or an import from a module calls up, with its line."""
    if isinstance(node, ast.Name):
        return [(node.id, node.lineno)]
    if isinstance(node, ast.Attribute):
        return [(node.attr, node.lineno)]
    if isinstance(node, ast.ImportFrom):
        return [(alias.name, alias.lineno) for alias in node.names]
    return []


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
