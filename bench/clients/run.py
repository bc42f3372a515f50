"""Do clients that others wrote work against the server, and which versions of them?

    python bench/clients/run.py [--only openai,litellm] [--trioserve PATH] [-- MODEL.toml ...]
    python bench/clients/run.py --base-url http://127.0.0.1:8000 --api-key KEY --model NAME

Starts a server with API keys, few slots and a short queue, by default on the simulated device, and
lets each client use it as its own users do: whole and streamed answers, usage, log probabilities,
refusals as the client's own exceptions, timeouts, departures. One line per check; exit status 1 if
one failed. What is in requirements.txt must be installed in this environment; trioserve need not
be, ``--trioserve`` names its command in another one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
from checks import Table, Target

sys.path.append(str(Path(__file__).resolve().parents[1]))
from lib.ending import with_parent

MODULES = {
    "openai": "openai_client",
    "extra_body": "extra_body",
    "anthropic": "anthropic_client",
    "litellm": "litellm_client",
    "langchain": "langchain_client",
    "llm": "llm_command",
    "guidellm": "guidellm_load",
    "locust": "locust_load",
    "prometheus": "prometheus_parser",
}
KEY = "the-second-key"
SLOTS, WAITING = 4, 4
SIMULATED = [
    *("--set", "model.source=random:llama?num_layers=1&hidden_size=32"),
    *("--set", "device.kind=simulated"),
    *("--set", "device.simulated_step_s=0.005"),
]
SETTINGS = [
    *("--set", f"scheduler.max_num_seqs={SLOTS}"),
    *("--set", f"scheduler.max_waiting={WAITING}"),
]
READY_S = 180.0


@contextlib.contextmanager
def started(command: str, arguments: list[str]) -> Iterator[Target]:
    """A server of our own, stopped at the end. It must stop by itself and in order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"TRIOSERVE_HTTP__API_KEYS": f"the-first-key,{KEY}"}
    run = [command, "run", *(arguments or SIMULATED), *SETTINGS, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            run,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=with_parent(),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(process, url)
            yield Target(url, served_by(url, KEY), KEY, SLOTS + WAITING, samples=bool(arguments))
        except BaseException:
            log.seek(0)
            shutil.copyfileobj(log, sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait()
        log.seek(0)
        if status or "Traceback" in log.read():
            log.seek(0)
            shutil.copyfileobj(log, sys.stderr)
            raise SystemExit(f"the server ended with {status}, or logged a traceback: see above")


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health/ready").is_success:
                return
        time.sleep(0.1)
    process.kill()
    raise SystemExit("the server did not become ready")


def served_by(url: str, key: str) -> str:
    """The name of the model, which clients must send.

    Raises:
        SystemExit: the server does not tell it.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise SystemExit(f"{url}/v1/models: {error}") from None


def check_client(name: str, target: Target) -> Table:
    """All checks of one client; one that is not installed is left out."""
    table = Table(name)
    module = importlib.import_module(MODULES[name])
    try:
        versions = [f"{package} {metadata.version(package)}" for package in module.PACKAGES]
    except metadata.PackageNotFoundError as error:
        table.leave_out("everything", f"{error.name} is not installed")
        return table
    print(f"\n{', '.join(versions)}", flush=True)
    module.run(target, table)
    with table.check("nothing is left open"):
        target.wait_for_open(0)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,...", help=", ".join(MODULES))
    beside = Path(sys.executable).with_name("trioserve")
    parser.add_argument("--trioserve", default=str(beside) if beside.exists() else "trioserve")
    parser.add_argument("--base-url", help="of a server that runs already, without /v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("server", nargs="*", help="for `trioserve run`, in place of the simulation")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(MODULES)
    if unknown := set(names) - MODULES.keys():
        parser.error(f"no client {', '.join(sorted(unknown))}; there are: {', '.join(MODULES)}")
    if args.base_url:
        url = args.base_url.rstrip("/")
        model = args.model or served_by(url, args.api_key)
        place: contextlib.AbstractContextManager[Target] = contextlib.nullcontext(
            Target(url, model, args.api_key)
        )
    else:
        place = started(args.trioserve, args.server)
    with place as target:
        version = httpx.get(f"{target.url}/version", headers=target.headers).json()["version"]
        print(f"trioserve {version}, {target.model}; Python {platform.python_version()}")
        tables = [check_client(name, target) for name in names]
    failed = [f"{table.client}: {what}" for table in tables for what in table.failed]
    print(f"\n{len(failed)} failed" + "".join(f"\n  {line}" for line in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
