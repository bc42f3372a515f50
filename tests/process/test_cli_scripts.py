"""scripts/: the environment is made once, kept in step, and safe when two start at once.

The Python they are given here is a small shell program that notes what it is asked for, so nothing
is downloaded and every failure can be had.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Does what scripts/lib.sh asks of a Python: -c, --version, -m venv --clear -- DIR, -m pip. Fails at
# pip where the file "fail" exists, and holds pip up while "hold" (a pipe) has no writer.
PYTHON = """\
#!/usr/bin/env bash
state={state}
case "$1 $2" in
    "--version ") echo "Python 3.99.0" ;;
    "-c "*) [[ ! -e $state/old ]] ;;
    "-m venv")
        echo venv >>"$state/log"
        mkdir -p "$5/bin"
        cp "$0" "$5/bin/python"
        cp "$state/trioserve" "$5/bin/trioserve"
        ;;
    "-m pip")
        [[ $3 == --version ]] && exit
        echo "pip $*" >>"$state/log"
        echo "chatter of pip"
        [[ ! -e $state/hold ]] || read -r <"$state/hold"
        [[ ! -e $state/fail ]]
        ;;
    "-m pytest") echo "pytest ${{*:3}} in $PWD" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
TRIOSERVE = '#!/usr/bin/env bash\necho "$$ $*"\n'


class Checkout:
    """A repository with scripts/ and what they read, and a Python that only pretends."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.state = folder / "state"
        self.log = self.state / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            (self.root / name).write_text(name)
        self.state.mkdir()
        self.python = self.program("python", PYTHON.format(state=self.state))
        self.program("trioserve", TRIOSERVE)

    def program(self, name: str, text: str) -> Path:
        path = self.state / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *args: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TRIOSERVE_")}
        return subprocess.Popen(
            [str(self.root / "scripts" / args[0]), *args[1:]],
            cwd=cwd or self.root,
            env=clean | {"TRIOSERVE_PYTHON": str(self.python)} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, *args: str, cwd: Path | None = None, **env: str) -> tuple[int, str, str]:
        process = self.start(*args, cwd=cwd, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def done(self) -> list[str]:
        """What Python was asked to do since the last look: "venv" and pip's targets."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.rpartition(" ")[2].rpartition("/")[2] for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_run_makes_the_environment_once_and_becomes_trioserve(
    checkout: Checkout, tmp_path: Path
) -> None:
    process = checkout.start("run", "m.toml", "--port", "1 2", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    # Its own process became trioserve, so that signals arrive; nothing but trioserve is on stdout.
    assert out == f"{process.pid} run m.toml --port 1 2\n"
    assert "chatter of pip" in err
    assert checkout.done() == ["venv", "setuptools", "checkout"]

    code, out, err = checkout.call("run")
    assert (code, err) == (0, "")
    assert out.endswith(" run\n")
    assert checkout.done() == []


def test_the_environment_follows_pyproject_and_constraints(checkout: Checkout) -> None:
    checkout.call("run")
    checkout.done()
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout.root / name).write_text("changed")
        assert checkout.call("run")[0] == 0
        assert checkout.done() == ["setuptools", "checkout"]
    assert checkout.call("run")[0] == 0
    assert checkout.done() == []


def test_tools_come_when_tests_want_them_and_stay(checkout: Checkout, tmp_path: Path) -> None:
    checkout.call("run")
    checkout.done()
    code, out, _ = checkout.call("test", "-k", "x y", cwd=tmp_path)
    assert (code, out) == (0, f"pytest -k x y in {checkout.root}\n")
    assert checkout.done() == ["setuptools", "checkout[dev]"]
    assert checkout.call("run")[0] == 0
    assert checkout.done() == []
    (checkout.root / "constraints.txt").write_text("changed")
    assert checkout.call("run")[0] == 0
    assert checkout.done() == ["setuptools", "checkout[dev]"]


def test_a_moved_checkout_is_installed_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.call("run")
    checkout.done()
    checkout.root = checkout.root.rename(tmp_path / "checkout")
    assert checkout.call("run")[0] == 0
    assert checkout.done() == ["setuptools", "checkout"]


def test_a_broken_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.call("run")
    checkout.done()
    (checkout.root / ".venv/bin/python").unlink()
    assert checkout.call("run")[0] == 0
    assert checkout.done() == ["venv", "setuptools", "checkout"]


def test_a_failed_install_is_an_error_and_is_tried_again(checkout: Checkout) -> None:
    (checkout.state / "fail").touch()
    code, out, err = checkout.call("run")
    assert (code, out) == (1, "")
    assert "run: pip failed" in err
    (checkout.state / "fail").unlink()
    checkout.done()
    assert checkout.call("run")[0] == 0
    assert checkout.done() == ["setuptools", "checkout"]


def test_two_at_once_install_once(checkout: Checkout) -> None:
    hold = checkout.state / "hold"
    os.mkfifo(hold)
    first, second = checkout.start("run", "1"), checkout.start("run", "2")
    with hold.open("w"):  # waits for the one that reached pip
        pass
    hold.unlink()
    for process, name in ((first, "1"), (second, "2")):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.endswith(f"run {name}\n")
    assert checkout.done() == ["venv", "setuptools", "checkout"]


def test_an_interrupted_install_leaves_no_lock_and_no_stamp(checkout: Checkout) -> None:
    hold = checkout.state / "hold"
    os.mkfifo(hold)
    process = checkout.start("run")
    with hold.open("w"):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        hold.unlink()
    checkout.done()
    assert checkout.call("run")[0] == 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere", "nowhere: no such program"), ("python", "too old or does not run")],
)
def test_a_python_that_will_not_do(checkout: Checkout, name: str, problem: str) -> None:
    (checkout.state / "old").touch()
    code, _, err = checkout.call("run", TRIOSERVE_PYTHON=str(checkout.state / name))
    assert code == 1
    assert err.startswith("run: TRIOSERVE_PYTHON=")
    assert problem in err
    assert checkout.done() == []


def test_the_environment_may_lie_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    assert checkout.call("run", TRIOSERVE_VENV=str(tmp_path / "x/y"))[0] == 0
    assert (tmp_path / "x/y/bin/trioserve").exists()
    assert not (checkout.root / ".venv").exists()


def test_bench_lists_what_there_is(checkout: Checkout) -> None:
    (checkout.root / "bench").mkdir()
    (checkout.root / "bench/decode.py").write_text('"""How fast is decoding?"""\n')
    code, out, _ = checkout.call("bench")
    assert code == 0
    assert "decode" in out
    assert "How fast is decoding?" in out
    code, _, err = checkout.call("bench", "nothing")
    assert code == 1
    assert "no benchmark 'nothing'" in err
    assert checkout.done() == []
