"""The ``trioserve`` program up to where the server would start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trioserve import __version__

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "trioserve")


def call(
    *args: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRIOSERVE_")}
    return subprocess.run(
        args,
        cwd=cwd or ROOT,
        env={**clean, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def imported_by(*args: str) -> set[str]:
    """The modules in an interpreter in which ``trioserve ARGS`` has ended."""
    program = (
        "import json, sys; from trioserve.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "print(json.dumps([code or 0, sorted(sys.modules)]))"
    )
    done = call(sys.executable, "-c", program, *args)
    assert done.returncode == 0, done.stderr
    _, modules = json.loads(done.stdout.splitlines()[-1])
    return set(modules)


@pytest.mark.parametrize(
    "program", [PROGRAM, (str(Path(sys.executable).with_name("trioserve")),)], ids=["-m", "script"]
)
def test_version(program: tuple[str, ...]) -> None:
    done = call(*program, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"trioserve {__version__}\n", "")


@pytest.mark.parametrize("args", [("--help",), ("-h",), ("run", "--help")])
def test_help_says_what_can_be_given(args: tuple[str, ...]) -> None:
    done = call(*PROGRAM, *args)
    assert done.returncode == 0
    wanted = ["--set", "--print-config", "MODEL.toml"] if "run" in args else ["run", "Exit codes"]
    assert all(word in done.stdout for word in wanted)


@pytest.mark.parametrize(
    "args", [("--version",), ("--help",), ("run", "--help"), ("nonsense",), ("run", "--nonsense")]
)
def test_pf_05_help_and_slips_load_nothing_heavy(args: tuple[str, ...]) -> None:
    modules = imported_by(*args)
    assert "click" in modules
    heavy = {"attr", "attrs", "cattrs", "tomllib", "asyncio", "trio", "quart", "hypercorn"}
    heavy |= {"torch", "numpy", "msgspec", "tokenizers", "rich", "huggingface_hub", "jinja2"}
    assert modules.isdisjoint(heavy)
    assert ("trioserve.cli.run" in modules) == ("run" in args)


def test_pf_05_faults_and_print_load_no_server(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[http]\nprot = 1\n")
    for args in (("run", str(tmp_path / "m.toml")), ("run", "--print-config")):
        modules = imported_by(*args)
        assert "trioserve.config.loading" in modules
        assert modules.isdisjoint({"trio", "torch", "numpy", "trioserve.main", "quart"})


def test_faults_are_told_all_at_once_and_end_with_2(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[http]\n\nprot = 1\nport = '512'\n")
    done = call(
        *(*PROGRAM, "run", "m.toml", "--max-model-len", "0", "--set", "x", "--set", "a=b"),
        cwd=tmp_path,
        env={"TRIOSERVE_LOG__LEVEL": "chatty"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "trioserve: --set x…: expected SECTION.KEY=VALUE",
        "trioserve: m.toml:3: key 'http.prot': unknown; did you mean 'port'?",
        "trioserve: --set a: key 'a': outside any section",
        "trioserve: m.toml:4: key 'http.port': expected an integer, got \"512\"; "
        "write it without quotes",
        'trioserve: TRIOSERVE_LOG__LEVEL: key \'log.level\': expected "debug", "info", "warning" '
        'or "error", got "chatty"',
        "trioserve: --max-model-len: key 'model.max_model_len': must be >= 1: 0",
    ]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("none.toml",), "none.toml: no such file"),
        ((".",), ".: is a directory"),
        (("--port", "8", "--set", "http.port=9"), "key 'http.port' is given by --set too"),
        (("--set", "=1"), "--set …: expected SECTION.KEY=VALUE"),
        (("--set", "model.hf_token:secret"), "--set model.hf_token…: expected SECTION.KEY=VALUE"),
        (("--uds", "a", "--port", "1"), "--port: key 'http.port': has no effect with http.uds"),
    ],
)
def test_a_slip_on_the_command_line_is_one_line(
    tmp_path: Path, args: tuple[str, ...], problem: str
) -> None:
    done = call(*PROGRAM, "run", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("trioserve: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [("run", "--prot", "1"), ("run", "a", "b"), ("rnu",)])
def test_a_command_line_that_cannot_be_read_ends_with_2(args: tuple[str, ...]) -> None:
    done = call(*PROGRAM, *args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_print_config_is_what_would_be_served(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[http]\nport = 1\nhost = 'file'\n[log]\nlevel = 'error'\n")
    args = ["m.toml", "--port", "3", "--set", "http.host=a", "--set", "http.host=b"]
    args += ["--model", "random:llama", "--device", "cpu", "--max-model-len", "auto"]
    args += ["--log-level", "debug", "--log-format", "json", "--uds", ""]
    done = call(*PROGRAM, "run", *args, "--print-config", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = tomllib.loads(done.stdout)
    assert (printed["http"]["port"], printed["http"]["host"]) == (3, "b")
    assert (printed["log"]["level"], printed["log"]["format"]) == ("debug", "json")
    assert printed["model"]["source"] == "random:llama"
    assert printed["device"]["kind"] == "cpu"
    assert "port = 3  # --port\n" in done.stdout

    (tmp_path / "again.toml").write_text(done.stdout)
    again = call(*PROGRAM, "run", "again.toml", "--print-config", cwd=tmp_path)
    assert tomllib.loads(again.stdout) == printed


def test_run_ends_with_what_the_server_returns(tmp_path: Path) -> None:
    """The one seam to the server: ``trioserve.main.run(loaded)``, here another one."""
    program = (
        "import sys, types; fake = types.ModuleType('trioserve.main')\n"
        "def run(loaded): print(loaded.config.http.port); return 7\n"
        "fake.run = run; sys.modules['trioserve.main'] = fake\n"
        "from trioserve.cli import main; main(['run', '--port', '1234'])"
    )
    done = call(sys.executable, "-c", program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "1234\n")


def test_a_containers_first_process_heeds_sigterm_from_the_start(tmp_path: Path) -> None:
    """The kernel drops signals that process 1 has no handler for."""
    program = (
        "import os, sys, time, types; fake = types.ModuleType('trioserve.main')\n"
        "def run(loaded): print('here', flush=True); time.sleep(60)\n"
        "fake.run = run; sys.modules['trioserve.main'] = fake\n"
        "if sys.argv[1] == 'first': os.getpid = lambda: 1\n"
        "from trioserve.cli import main; main(['run'])"
    )
    for which, code in (("first", 143), ("other", -signal.SIGTERM)):
        with subprocess.Popen(
            [sys.executable, "-c", program, which], stdout=subprocess.PIPE, cwd=tmp_path
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            process.terminate()
            assert process.wait(10) == code
