"""Settings of who may ask for what: faults that are seen as the configuration is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.config import load, to_toml
from trioserve.config.keys import forget_keys, without_keys
from trioserve.errors import ConfigError

SECRET = "sk-very-secret"
FAULTS: list[tuple[dict[str, object], str]] = [
    ({"http.api_keys": ["ok", ""]}, "key 2 must be printable ASCII"),
    ({"http.api_keys": [f"{SECRET} "]}, "key 1 must be printable ASCII"),
    ({"http.api_keys": [f"{SECRET}é"]}, "key 1 must be printable ASCII"),
    ({"http.api_keys": 7}, "http.api_keys"),
    ({"http.open_routes": ["metrics"]}, "'metrics' is no path"),
    ({"http.cors_origins": ["https://a.example", "*"]}, "stands for every origin"),
    ({"http.cors_origins": ["*"], "http.cors_credentials": True}, "cannot go with"),
    ({"http.cors_credentials": True}, "no effect without http.cors_origins"),
    ({"http.cors_origins": ["https://a.example/"]}, "is no origin"),
    ({"http.cors_origins": ["https://A.example"]}, "is no origin"),
    ({"http.cors_origins": ["a.example"]}, "is no origin"),
    ({"http.cors_origins": ["null"]}, "is no origin"),
    ({"http.cors_origins": ["https://*.example"]}, "is no origin"),
    ({"http.cors_origins": ["https://a.example:x"]}, "is no origin"),
    ({"http.tls_key": "/k"}, "no effect without http.tls_cert"),
    ({"http.tls_client_ca": "/k"}, "no effect without http.tls_cert"),
    ({"log.inputs": True}, "no effect without log.requests"),
    ({"log.outputs": True}, "no effect without log.requests"),
    ({"http.max_header_bytes": 10}, "max_header_bytes"),
]


@pytest.mark.parametrize(("given", "fault"), FAULTS, ids=range(len(FAULTS)))
def test_faults(given: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        load(None, env={}, overrides=given)
    assert SECRET not in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "origin",
    ["https://a.example", "http://localhost:3000", "http://[::1]:8000", "app://obsidian.md"],
)
def test_origins(origin: str) -> None:
    given = {"http.cors_origins": [origin], "http.cors_credentials": True}
    assert load(None, env={}, overrides=given).config.http.cors_origins == (origin,)


def test_keys_from_the_environment_are_shown_nowhere() -> None:
    loaded = load(None, env={"TRIOSERVE_HTTP__API_KEYS": f"{SECRET}, other"}, overrides={})
    assert loaded.config.http.api_keys == (SECRET, "other")
    assert SECRET not in to_toml(loaded) + loaded.describe_non_defaults()
    assert "http.api_keys" in loaded.describe_non_defaults()


@pytest.mark.parametrize("text", ["", " ", ",", "[]"])
def test_empty_keys_in_the_environment_do_not_open_the_server(text: str) -> None:
    """As from a secret that was not filled in."""
    with pytest.raises(ConfigError, match=r"TRIOSERVE_HTTP__API_KEYS.*holds no key"):
        load(None, env={"TRIOSERVE_HTTP__API_KEYS": text}, overrides={})


def test_a_flag_may_take_the_keys_of_a_file_away(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(f'[http]\napi_keys = ["{SECRET}"]\n')
    assert load(path, env={}, overrides={}).config.http.api_keys == (SECRET,)
    assert load(path, env={}, overrides={"http.api_keys": ""}).config.http.api_keys == ()


def test_children_get_no_keys() -> None:
    env = {"TRIOSERVE_HTTP__API_KEYS": SECRET, "TRIOSERVE_MODEL__HF_TOKEN": "t", "PATH": "/bin"}
    config = load(None, env=env, overrides={}).config
    assert SECRET not in str(without_keys(config))
    assert without_keys(config).model.hf_token == "t"
    forget_keys(env)
    assert env == {"PATH": "/bin"}
