"""Every way to get trioserve has ``trioserve.kernels``, which lies beside the package as kernels/.

Works without a package index: nothing is built in isolation and nothing is fetched.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROBE = (
    "import trioserve.kernels.cpu as k, trioserve.cli as c; print(k.__file__); print(c.__file__)"
)


def python(*args: object, cwd: Path, program: object = sys.executable) -> str:
    """What a Python printed, which must end well; other checkouts and settings stay out of it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_CACHE_DIR": str(cwd / "pip")}
    done = subprocess.run(
        [str(program), *map(str, args)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*args: object, cwd: Path) -> None:
    python("-m", "pip", *args, "--quiet", "--disable-pip-version-check", cwd=cwd)


def modules_in(folder: Path) -> set[str]:
    """The modules of a checkout as paths below trioserve/, kernels/ where it is imported."""
    own = {p.relative_to(folder).as_posix() for p in folder.glob("trioserve/**/*.py")}
    kernels = {p.relative_to(folder).as_posix() for p in folder.glob("kernels/**/*.py")}
    assert kernels
    return {p for p in own if "trioserve/kernels/" not in p} | {f"trioserve/{p}" for p in kernels}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("trioserve", "kernels"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", out, checkout, cwd=out)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", folder, wheel, cwd=folder)
    return folder


def test_wheel_holds_every_module_and_the_type_marker(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules_in(checkout)
    assert "trioserve/py.typed" in names
    page = {path.name for path in checkout.glob("trioserve/http/page/*.*")} - {"__init__.py"}
    assert "page.html" in page
    assert {f"trioserve/http/page/{name}" for name in page} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_what_is_imported_is_declared(checkout: Path) -> None:
    """Each distribution that trioserve imports itself is asked for by name, not through another."""
    with (checkout / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    texts = [*project["dependencies"]]
    for extra in ("otel", "triton", "transformers"):  # imported where they are installed
        texts += project["optional-dependencies"][extra]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    homes = packages_distributions()
    for path in [*checkout.glob("trioserve/**/*.py"), *checkout.glob("kernels/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in imported(node) - sys.stdlib_module_names - {"trioserve"}:
                # triton has no distribution where it is not installed.
                names = {canonicalize_name(name) for name in homes.get(module, [module])}
                assert names & declared, f"{path.relative_to(checkout)} imports {module}"


def imported(node: ast.AST) -> set[str]:
    """The top-level modules that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def test_sdist_makes_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    python("-c", build, cwd=checkout)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    [again] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert set(one.namelist()) == set(other.namelist())


def test_installed_wheel_has_the_kernels(installed: Path, tmp_path: Path) -> None:
    # -I shuts out PYTHONPATH and the working directory; the path is set by hand instead.
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); {PROBE}"
    files = python("-I", "-c", program, cwd=tmp_path).splitlines()
    assert files == [
        f"{installed}/trioserve/kernels/cpu/__init__.py",
        f"{installed}/trioserve/cli/__init__.py",
    ]


def test_editable_install_has_the_kernels_from_any_directory(
    checkout: Path, tmp_path: Path
) -> None:
    editable = tmp_path / "checkout"
    shutil.copytree(checkout, editable, symlinks=True)
    # What holds without the link as well: a checkout whose links were lost.
    (editable / "trioserve/kernels").unlink()
    venv = tmp_path / "venv"
    python("-m", "venv", "--without-pip", venv, cwd=tmp_path)
    [site] = venv.glob("lib/python*/site-packages")
    # Packages of this environment, whose own .pth files, so its own trioserve, are not read.
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip(
        *("--python", venv / "bin/python", "install"),
        *("--no-deps", "--no-build-isolation", "--editable", editable),
        cwd=tmp_path,
    )
    for cwd in (tmp_path, editable, editable / "trioserve"):
        files = python("-c", PROBE, cwd=cwd, program=venv / "bin/python").splitlines()
        assert files == [
            f"{editable}/kernels/cpu/__init__.py",
            f"{editable}/trioserve/cli/__init__.py",
        ]
    version = python("--version", cwd=tmp_path, program=venv / "bin/trioserve")
    assert version.startswith("trioserve ")


def test_this_environment_has_the_kernels_from_any_directory(tmp_path: Path) -> None:
    for cwd in (tmp_path, ROOT, ROOT / "trioserve"):
        kernels, cli = python("-c", PROBE, cwd=cwd).splitlines()
        assert Path(kernels).resolve() == ROOT / "kernels/cpu/__init__.py"
        assert Path(cli) == ROOT / "trioserve/cli/__init__.py"


@pytest.mark.parametrize("where", ["checkout", "installed"])
def test_the_type_checker_finds_the_kernels(
    where: str, checkout: Path, installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "probe.py").write_text(
        "import trioserve.kernels.cpu\nimport trioserve.kernels.nothing\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "probe.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(checkout if where == "checkout" else installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    faults = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(faults) == 1, done.stdout + done.stderr
    assert "probe.py:2" in faults[0]
    assert '"trioserve.kernels.nothing"' in faults[0]
