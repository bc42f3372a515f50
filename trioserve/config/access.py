"""Faults of the settings that say who may ask for what, and what is logged of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Faults = Iterator[tuple[str, str]]

KEY = re.compile(r"[!-~]+")  # what a header can carry without a doubt
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")


def _api_keys(values: Mapping[str, Any], origins: Mapping[str, Any]) -> Faults:
    if not values["http.api_keys"] and origins["http.api_keys"].layer == "env":
        # Most likely a secret that was not filled in; the server would be open to everybody.
        yield "http.api_keys", "holds no key; unset the variable to serve without keys"
    for number, key in enumerate(values["http.api_keys"], 1):
        if not KEY.fullmatch(key):
            yield (
                "http.api_keys",
                f"key {number} must be printable ASCII without spaces, and not empty",
            )


def _open_routes(values: Mapping[str, Any], _: object) -> Faults:
    for path in values["http.open_routes"]:
        if not path.startswith("/"):
            yield "http.open_routes", f"'{path}' is no path; paths begin with /"


def _cors(values: Mapping[str, Any], _: object) -> Faults:
    origins = values["http.cors_origins"]
    if "*" in origins:
        if len(origins) > 1:
            yield "http.cors_origins", '"*" stands for every origin; leave out the others'
        if values["http.cors_credentials"]:
            yield "http.cors_credentials", 'cannot go with "*" as origin; list the origins'
        return
    if values["http.cors_credentials"] and not origins:
        yield "http.cors_credentials", "has no effect without http.cors_origins"
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            yield (
                "http.cors_origins",
                f"'{origin}' is no origin; write scheme://host or scheme://host:port in small "
                "letters, without a path",
            )


def _tls(values: Mapping[str, Any], _: object) -> Faults:
    if values["http.tls_cert"] is None:
        for key in ("http.tls_key", "http.tls_client_ca"):
            if values[key] is not None:
                yield key, "has no effect without http.tls_cert"


def _request_log(values: Mapping[str, Any], _: object) -> Faults:
    if not values["log.requests"]:
        for key in ("log.inputs", "log.outputs"):
            if values[key]:
                yield key, "has no effect without log.requests = true"


Check = Callable[[Mapping[str, Any], Any], Faults]
ACCESS_CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("http.api_keys",), _api_keys),
    (("http.open_routes",), _open_routes),
    (("http.cors_origins", "http.cors_credentials"), _cors),
    (("http.tls_cert", "http.tls_key", "http.tls_client_ca"), _tls),
    (("log.requests", "log.inputs", "log.outputs"), _request_log),
)
