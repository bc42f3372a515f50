"""The files of examples/deploy/ agree with the code."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click.testing
import yaml

import trioserve.errors
from trioserve.cli import cli
from trioserve.config import load
from trioserve.config.schema import Config
from trioserve.errors import BindError, ConfigError, DrainCut, StartupError
from trioserve.http import app, server, sse
from trioserve.http.listeners import BACKLOG
from trioserve.ipc import process
from trioserve.notify import MARGIN_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples/deploy"
DOC = (ROOT / "docs/deploy.md").read_text()

# What may pass between the drain's deadline and the end: last words, then the kill ladder.
AFTER_DRAIN_S = server.FLUSH_S + process.GRACE_S + process.DUMP_S + process.GONE_S


class Unit(configparser.RawConfigParser):
    """A systemd unit: keys have case, and may be given again to begin anew."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.optionxform = str  # type: ignore[assignment,method-assign]
        assert self.read(DEPLOY / "systemd" / name)


SERVICE = Unit("trioserve.service")
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()


def config_of(path: Path) -> Config:
    return load(path, env={}, overrides={}).config


def kind(name: str) -> dict[str, Any]:
    [found] = [document for document in DOCUMENTS if document["kind"] == name]
    return found  # type: ignore[no-any-return]


def the_container() -> dict[str, Any]:
    [container] = kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def command_line_is_good(args: list[str]) -> None:
    """``trioserve ARGS --print-config`` takes it, with our model.toml for the installed one."""
    args = [str(DEPLOY / "model.toml") if a.endswith("model.toml") else a for a in args]
    done = click.testing.CliRunner().invoke(cli, [*args, "--print-config"])
    assert done.exit_code == 0, done.output


# ---------------------------------------------------------------------------------- systemd


def test_the_unit_speaks_our_protocol() -> None:
    service = SERVICE["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert service["KillMode"] == "mixed"
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["WatchdogSec"]) > 4 * 0.25


def test_the_unit_starts_what_the_command_line_takes() -> None:
    drop_in = Unit("trioserve.service.d/socket.conf")
    for unit in (SERVICE, drop_in):
        program, *args = shlex.split(unit["Service"]["ExecStart"])
        assert program.endswith("/bin/trioserve")
        command_line_is_good(args)
    assert args[-2:] == ["--set", "http.fd=3"]
    text = (DEPLOY / "systemd/trioserve.service.d/socket.conf").read_text()
    assert "\nExecStart=\nExecStart=/" in text, "systemd adds to the list unless it is emptied"


def test_the_socket_unit_has_the_address_and_backlog_of_the_configuration() -> None:
    socket = Unit("trioserve.socket")["Socket"]
    http = config_of(DEPLOY / "model.toml").http
    assert socket["ListenStream"] == f"{http.host}:{http.port}"
    assert socket["Accept"] == "no"
    assert int(socket["Backlog"]) == BACKLOG


def test_the_unit_waits_for_the_drain_and_what_follows() -> None:
    drain_s = config_of(DEPLOY / "model.toml").engine.drain_timeout_s
    assert float(SERVICE["Service"]["TimeoutStopSec"]) > drain_s + AFTER_DRAIN_S
    assert MARGIN_S > AFTER_DRAIN_S, "so does the extension that the server asks for"


def test_the_unit_knows_the_exit_codes() -> None:
    service = SERVICE["Service"]
    assert service["Restart"] == "on-failure"
    in_vain = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert in_vain == {ConfigError.exit_code, BindError.exit_code, StartupError.exit_code}
    asked = {int(code) for code in service["SuccessExitStatus"].split()}
    assert asked == {DrainCut.exit_code, 130, 143}
    classes = [c for c in vars(trioserve.errors).values() if hasattr(c, "exit_code")]
    ours = {c.exit_code for c in classes}
    again = {int(n) for n in re.findall(r"\d+", DOC.split("| try again | after")[1].split("|")[0])}
    assert again == ours - in_vain - asked


def test_the_unit_lets_the_cache_be_written_and_kernels_be_compiled() -> None:
    service = SERVICE["Service"]
    text = (DEPLOY / "systemd/trioserve.service").read_text()
    assert "Environment=XDG_CACHE_HOME=%C\n" in text
    assert service["CacheDirectory"] == "trioserve"
    assert "MemoryDenyWriteExecute" not in service
    assert int(service["LimitNOFILE"]) > Config().http.max_connections + 1000


# ------------------------------------------------------------------------------- containers


def test_the_containers_command_is_ours() -> None:
    lines = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", CONTAINERFILE, re.M))
    program, *entry = json.loads(lines["ENTRYPOINT"])
    assert program == "trioserve"
    command_line_is_good([*entry, *json.loads(lines["CMD"])])
    assert "STOPSIGNAL SIGTERM" in CONTAINERFILE


def test_the_container_has_the_port_the_probe_and_a_user() -> None:
    port = config_of(DEPLOY / "model.toml").http.port
    assert re.search(rf"^EXPOSE {port}$", CONTAINERFILE, re.M)
    [check] = re.findall(r"HEALTHCHECK .*?CMD (\[.*?\])$", CONTAINERFILE, re.M | re.S)
    python, _, program = json.loads(check)
    assert python == "python"
    compile(program, "HEALTHCHECK", "exec")
    [path] = re.findall(rf"http://127\.0\.0\.1:{port}(/[a-z/]+)'", program)
    assert path == "/health/ready"
    assert path in app.ROUTES
    [uid] = re.findall(r"^USER (\d+):\d+$", CONTAINERFILE, re.M)
    assert f"--uid {uid} " in CONTAINERFILE
    assert (
        int(uid) == kind("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    )


def test_what_the_container_copies_is_there_and_is_what_the_package_needs() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (.*) \S+$", CONTAINERFILE, re.M)
        for source in line.split()
    ]
    assert all((ROOT / source).exists() for source in copied)
    assert {"pyproject.toml", "trioserve", "kernels", "README.md"} <= set(copied)
    assert re.search(r"^FROM python:3\.(1[1-9])-slim$", CONTAINERFILE, re.M)
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert required == ">=3.11"


# ------------------------------------------------------------------------------- kubernetes


def test_probes_are_routes_that_mean_what_they_are_asked_for() -> None:
    container = the_container()
    [port] = container["ports"]
    wanted = {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    for name, path in wanted.items():
        probe = container[f"{name}Probe"]
        assert probe["httpGet"] == {"path": path, "port": port["name"]}
        assert path in app.ROUTES
    startup = container["startupProbe"]
    silence_s = Config().engine.startup_silence_s
    assert startup["periodSeconds"] * startup["failureThreshold"] > 2 * silence_s


def test_the_pods_configuration_is_ours_and_its_ports_agree(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(kind("ConfigMap")["data"]["model.toml"])
    config = config_of(path)
    [port] = the_container()["ports"]
    assert config.http.port == port["containerPort"]
    assert config.http.host == "0.0.0.0"
    [service_port] = kind("Service")["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    template = kind("Deployment")["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == config.http.port
    assert annotations["prometheus.io/path"] in app.ROUTES
    assert template["spec"]["terminationGracePeriodSeconds"] > (
        config.engine.drain_timeout_s + AFTER_DRAIN_S
    )


def test_the_pods_parts_find_each_other() -> None:
    deployment = kind("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert kind("Service")["spec"]["selector"].items() <= labels.items()
    spec, container = deployment["template"]["spec"], the_container()
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["config"]["configMap"]["name"] == kind("ConfigMap")["metadata"]["name"]
    assert container["args"] == [mounts["config"] + "/model.toml"]
    command_line_is_good(["run", *container["args"]])
    assert f"XDG_CACHE_HOME={mounts['cache']}" in CONTAINERFILE
    assert container["securityContext"]["readOnlyRootFilesystem"]


# ------------------------------------------------------------------------------------ nginx


def parse_nginx(text: str) -> list[tuple[str, list[str], list[Any] | None]]:
    """Directives as (name, arguments, block or None). Raises ValueError where it does not parse."""
    tokens = re.findall(r"#[^\n]*|\"[^\"]*\"|[{};]|[^\s{};]+", text)
    stack: list[list[Any]] = [[]]
    words: list[str] = []
    for token in (t for t in tokens if not t.startswith("#")):
        if token == "}":
            if words or len(stack) == 1:
                raise ValueError(f"a brace too many, or no semicolon: {words}")
            stack.pop()
        elif token in ";{":
            name, *arguments = words
            block: list[Any] | None = [] if token == "{" else None
            stack[-1].append((name, arguments, block))
            words = []
            if block is not None:
                stack.append(block)
        else:
            words.append(token.strip('"'))
    if words or len(stack) > 1:
        raise ValueError("ends within a directive or a block")
    return stack[0]


def test_nginx_passes_streams_on_as_they_come() -> None:
    blocks = parse_nginx((DEPLOY / "nginx.conf").read_text())
    http = config_of(DEPLOY / "model.toml").http
    [(_, [name], upstream)] = [b for b in blocks if b[0] == "upstream"]
    assert upstream is not None
    directives = {directive: arguments for directive, arguments, _ in upstream}
    assert directives["server"] == [f"{http.host}:{http.port}"]
    assert seconds(directives["keepalive_timeout"]) < http.keep_alive_timeout_s
    [(_, _, nginx)] = [b for b in blocks if b[0] == "server"]
    assert nginx is not None
    locations = {" ".join(arguments): block for d, arguments, block in nginx if d == "location"}
    api = {d: arguments for d, arguments, _ in locations["/v1/"] or () if d != "proxy_set_header"}
    headers = {a[0]: a[1] for d, a, _ in locations["/v1/"] or () if d == "proxy_set_header"}
    assert api["proxy_pass"] == [f"http://{name}"]
    assert (api["proxy_http_version"], headers["Connection"]) == (["1.1"], "")
    assert api["proxy_buffering"] == api["gzip"] == api["proxy_ignore_client_abort"] == ["off"]
    assert seconds(api["proxy_read_timeout"]) > http.heartbeat_s
    assert api["client_max_body_size"] == [f"{http.max_body_bytes // 2**20}m"]
    assert "X-Request-Id" in headers
    assert sse.HEADERS["X-Accel-Buffering"] == "no"
    for location in locations:
        path = location.removeprefix("= ")
        assert path == "/" or any(route.startswith(path) for route in app.ROUTES)


def seconds(arguments: list[str]) -> float:
    [text] = arguments
    assert text.endswith("s")
    return float(text[:-1])


# ---------------------------------------------------------------------------------- the page


def test_the_page_names_every_file_and_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", DOC)
    assert links
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
    linked = {(ROOT / "docs" / link).resolve() for link in links}
    files = {path for path in DEPLOY.rglob("*") if path.is_file()} - {DEPLOY / "model.toml"}
    assert files <= linked


def test_the_pages_numbers_are_the_codes() -> None:
    engine = Config().engine
    assert (
        f"`engine.drain_timeout_s` ({engine.drain_timeout_s:g} s) and up to {AFTER_DRAIN_S:g} s"
        in DOC
    )
    ladder = f"({process.GRACE_S:g} + {process.DUMP_S:g} + {process.GONE_S:g} s)"
    assert f"{server.FLUSH_S:g} s of last words" in DOC
    assert ladder in DOC
    for path in (DEPLOY / "systemd/trioserve.service", DEPLOY / "kubernetes.yaml"):
        assert f"the {AFTER_DRAIN_S:g} s that ending" in path.read_text()
