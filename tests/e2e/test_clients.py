"""bench/clients/, for those clients that are here anyway."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = Path("bench/clients").absolute()
REQUIREMENTS = CLIENTS / "requirements.txt"
PAGE = Path("docs/clients.md").absolute()


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CLIENTS / "run.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("name", ["openai", "extra_body", "anthropic", "prometheus"])
def test_client(name: str) -> None:
    random = ("--set", "model.source=random:llama?num_layers=1&hidden_size=32")
    server = (*random, "--device", "cpu") if name == "extra_body" else ()
    done = call("--only", name, "--", *server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 failed\n")
    assert " ok " in done.stdout
    assert " left out " not in done.stdout


def test_the_versions_of_the_page_are_those_that_are_tried() -> None:
    table = re.findall(r"^\| `([a-z-]+)`.*? \| ([0-9.]+) \|", PAGE.read_text(), re.MULTILINE)
    pinned = re.findall(r"^([a-z-]+)==([0-9.]+)", REQUIREMENTS.read_text(), re.MULTILINE)
    assert dict(table) == {
        name: version for name, version in pinned if name not in ("attrs", "httpx")
    }


def test_a_client_that_is_not_here_is_left_out() -> None:
    done = call("--only", "litellm")
    assert done.returncode == 0
    assert "left out  everything" in done.stdout
    assert "litellm is not installed" in done.stdout


def test_a_check_that_fails_is_told_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(CLIENTS)
    import checks

    table = checks.Table("someone")
    with table.check("one"):
        raise ValueError("of the\nfirst")
    with table.check("two"), checks.raises(ValueError, args=("b",)):
        raise ValueError("a")
    with table.check("three"), checks.raises(ValueError):
        pass
    with table.check("four"):
        checks.equal(1, 1)
    assert table.failed == ["one", "two", "three"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[0] == "someone"] == ["FAILED"] * 3 + ["ok"]


def test_a_server_that_refuses_is_one_line() -> None:
    done = call("--base-url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("http://127.0.0.1:1/v1/models: ")
    assert len(done.stderr.splitlines()) == 1
