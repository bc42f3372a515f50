"""Faults of single values and of values together that need no model to be seen."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trioserve.config.access import ACCESS_CHECKS
from trioserve.config.keys import Key
from trioserve.config.layers import Origin
from trioserve.config.sizes import parse_size
from trioserve.errors import ConfigError

Values = Mapping[str, Any]
Origins = Mapping[str, Origin]
# What sets a model source apart from a path. A file of such a name is reached as ./name.
SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
# sockaddr_un.sun_path holds 108 bytes with the closing NUL.
MAX_SOCKET_PATH_BYTES = 107


def absolute(key: Key, value: Any, base: Path) -> Any:
    """The value of a path key made absolute, ``~`` expanded; a source with a scheme as it is.

    Raises:
        ConfigError: for an empty path, or where there is no home for ``~``.
    """
    if not key.path or not isinstance(value, str):
        return value
    if not value.strip():
        raise ConfigError("must not be empty")
    if key.dotted == "model.source" and SCHEME.match(value):
        return value
    try:
        return str(base / Path(value).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"'{value}': {error}") from None


def check_together(values: Values, origins: Origins) -> list[str]:
    """One line for each fault. Keys missing from ``values`` had faults of their own before."""
    problems = []
    for keys, check in CHECKS:
        if all(key in values for key in keys):
            for key, fault in check(values, origins):
                origin = origins[key]
                problems.append(f"{origin}: key '{key}': {fault}")
    return problems


def _cache_memory(values: Values, _: Origins) -> Iterator[tuple[str, str]]:
    memory = values["cache.memory"]
    if memory == "auto":
        return
    try:
        size = parse_size(memory) if isinstance(memory, str) else memory
    except ConfigError as error:
        yield "cache.memory", f'{error}, or "auto"'
    else:
        if size < 1:
            yield "cache.memory", f"must be at least 1 byte: {memory}"


def _host(values: Values, _: Origins) -> Iterator[tuple[str, str]]:
    if not values["http.host"].strip():
        yield "http.host", 'must not be empty; write "0.0.0.0" or "::" for all addresses'


def _served_names(values: Values, _: Origins) -> Iterator[tuple[str, str]]:
    names = values["model.served_names"]
    if any(not name.strip() for name in names):
        yield "model.served_names", "holds an empty name"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "model.served_names", f"holds '{name}' twice"


def _said_in_vain(key: str, decider: str, origins: Origins) -> bool:
    """Whether a flag or a variable gave ``key``, which ``decider`` makes useless.

    A stronger layer may decide otherwise than a weaker one expected. A file may describe what
    another layer switches off, and a printed configuration does.
    """
    return origins[key].layer in ("env", "flag") and not origins[key] < origins[decider]


def _listener(values: Values, origins: Origins) -> Iterator[tuple[str, str]]:
    uds, fd = values["http.uds"], values["http.fd"]
    if uds is not None and fd is not None:
        yield "http.fd", f"cannot go with http.uds ({origins['http.uds']}); leave one out"
        return
    used = "http.uds" if uds is not None else "http.fd" if fd is not None else None
    if used is None:
        return
    for key in ("http.host", "http.port"):
        if _said_in_vain(key, used, origins):
            yield key, f"has no effect with {used} ({origins[used]}); leave one out"


def _socket_path(values: Values, _: Origins) -> Iterator[tuple[str, str]]:
    uds = values["http.uds"]
    if uds is not None and len(os.fsencode(uds)) > MAX_SOCKET_PATH_BYTES:
        yield "http.uds", f"'{uds}' is longer than a socket's path may be, {MAX_SOCKET_PATH_BYTES}"


def _simulated(values: Values, origins: Origins) -> Iterator[tuple[str, str]]:
    kind = values["device.kind"]
    if kind == "simulated":
        return
    for key in ("device.simulated_step_s", "device.simulated_load_s"):
        if _said_in_vain(key, "device.kind", origins):
            yield key, f'has no effect with device.kind = "{kind}"; it takes "simulated"'


def _faults(values: Values, _: Origins) -> Iterator[tuple[str, str]]:
    faults = values["test.faults"]
    if not faults:
        return
    if not values["test.allow_faults"]:
        yield "test.faults", "faults are for tests; they need test.allow_faults = true"
        return
    from trioserve.core.faults import parse_fault

    for text in faults:
        try:
            parse_fault(text)
        except ConfigError as error:
            yield "test.faults", str(error)


def _trace(values: Values, _: Origins) -> Iterator[tuple[str, str]]:
    for index, header in enumerate(values["trace.headers"]):  # secret: never shown
        name, equals, value = header.partition("=")
        if not (name and equals and f"{name}{value}".isprintable() and header.isascii()):
            yield "trace.headers", f'entry {index + 1} must be "name=value"'
    endpoint = values["trace.endpoint"]
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong:
        yield "trace.endpoint", f"'{endpoint}' is no URL such as http://localhost:4318"
    elif not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        yield "trace.endpoint", 'needs OpenTelemetry: pip install "trioserve[otel]"'


def _is_installed(module: str) -> bool:
    """Whether a module is there; imports only the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


Check = Callable[[Values, Origins], Iterator[tuple[str, str]]]
CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("cache.memory",), _cache_memory),
    (("http.host",), _host),
    (("model.served_names",), _served_names),
    (("http.host", "http.port", "http.uds", "http.fd"), _listener),
    (("http.uds",), _socket_path),
    (
        ("device.kind", "device.simulated_step_s", "device.simulated_load_s"),
        _simulated,
    ),
    (("test.allow_faults", "test.faults"), _faults),
    (("trace.endpoint", "trace.headers"), _trace),
    *ACCESS_CHECKS,
)
