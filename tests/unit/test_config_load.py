"""``load``: every way a configuration can be wrong, who wins, and that it prints what it loads."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.config import Config, LoadedConfig, Text, load, to_toml
from trioserve.config.keys import KEYS, all_keys
from trioserve.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "model.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def faults(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> list[str]:
    """The problems of a load that must fail, without the directory of the file."""
    with pytest.raises(ConfigError) as caught:
        load(path, env=env or {}, overrides=overrides or {})
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert all("\n" not in problem for problem in caught.value.problems)
    return [problem.replace(f"{path}:", "F:") for problem in caught.value.problems]


def setting(dotted: str, text: str) -> Any:
    """The value that ``--set dotted=text`` comes to."""
    return load(None, env={}, overrides={dotted: text}).value(dotted)


def fault_of(dotted: str, text: str) -> str:
    [problem] = faults(overrides={dotted: Text(text, where="--set")})
    return problem.removeprefix(f"--set: key '{dotted}': ")


# ---------------------------------------------------------------------------- the unhappy paths


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[scheduler]\n\nmax_num_seq = 8",
            "F:3: key 'scheduler.max_num_seq': unknown; did you mean 'max_num_seqs'?",
        ),
        (
            "[model]\nmax_modle_len = 512",
            "F:2: key 'model.max_modle_len': unknown; did you mean 'max_model_len'?",
        ),
        (
            "[model]\nmax-model-len = 512",
            "F:2: key 'model.max-model-len': unknown; did you mean 'max_model_len'?",
        ),
        (
            "[model]\nMAX_MODEL_LEN = 512",
            "F:2: key 'model.MAX_MODEL_LEN': unknown; did you mean 'max_model_len'?",
        ),
        (
            "[http]\nmax_num_seqs = 8",
            "F:2: key 'http.max_num_seqs': unknown; 'max_num_seqs' belongs in section [scheduler]",
        ),
        (
            "[log]\nmax_num_batched_token = 8",
            "F:2: key 'log.max_num_batched_token': unknown; did you mean "
            "'max_num_batched_tokens' in section [scheduler]?",
        ),
        (
            "[kernels]\nzzz = 8",
            "F:2: key 'kernels.zzz': unknown; known are attention, instructions",
        ),
        (
            "max_num_seqs = 8",
            "F:1: key 'max_num_seqs': outside any section; "
            "'max_num_seqs' belongs in section [scheduler]",
        ),
        ("[sheduler]\nx = 1", "F:1: section [sheduler]: unknown; did you mean [scheduler]?"),
        ("\n[lora]", "F:2: section [lora]: reserved; this version has no keys there"),
        ("http = 3", "F:1: section [http]: must be one table of keys"),
        ("[[http]]\nport = 1", "F:1: section [http]: must be one table of keys"),
        (
            '[http]\nport = "512"',
            "F:2: key 'http.port': expected an integer, got \"512\"; write it without quotes",
        ),
        ("[http]\nport = true", "F:2: key 'http.port': expected an integer, got true"),
        ("[http]\nport = 1.0", "F:2: key 'http.port': expected an integer, got 1.0"),
        ("[http]\nhttp2 = 1", "F:2: key 'http.http2': expected true or false, got 1"),
        ("[http]\nuds.path = 1", "F:2: key 'http.uds': expected a string, got a table"),
        (
            "[http]\nhost = 1.5",
            "F:2: key 'http.host': expected a string, got 1.5; write it in quotes",
        ),
        (
            "[http]\nhost = 1979-05-27",
            "F:2: key 'http.host': expected a string, got 1979-05-27; write it in quotes",
        ),
        ("[http]\nport = 65536", "F:2: key 'http.port': must be <= 65535: 65536"),
        (
            "[http]\nmax_body_bytes = 9223372036854775808",
            "F:2: key 'http.max_body_bytes': must fit in 64 bits",
        ),
        (
            "[log]\nstats_interval_s = inf",
            "F:2: key 'log.stats_interval_s': must be a finite number",
        ),
        (
            "[log]\nstats_interval_s = nan",
            "F:2: key 'log.stats_interval_s': must be a finite number",
        ),
        (
            "[model]\nmax_model_len = 0",
            "F:2: key 'model.max_model_len': must be >= 1: 0",
        ),
        (
            '[model]\nmax_model_len = "atuo"',
            'F:2: key \'model.max_model_len\': expected an integer or "auto", got "atuo"; '
            'did you mean "auto"?',
        ),
        (
            '[log]\nlevel = "INFO"',
            'F:2: key \'log.level\': expected "debug", "info", "warning" or "error", got "INFO"; '
            'did you mean "info"?',
        ),
        (
            '[model]\nserved_names = "a"',
            "F:2: key 'model.served_names': expected an array of strings, got \"a\"; "
            "write it in brackets",
        ),
        (
            "[model]\nserved_names = [\n'a',\n1]",
            "F:2: key 'model.served_names': expected an array of strings, got an array",
        ),
        ("[model]\nserved_names = ['a', 'a']", "F:2: key 'model.served_names': holds 'a' twice"),
        ("[model]\nserved_names = ['']", "F:2: key 'model.served_names': holds an empty name"),
        ("[model]\nsource = ''", "F:2: key 'model.source': must not be empty"),
        ('[model]\nsource = "a\\u0000"', "F:2: key 'model.source': holds a NUL character"),
        (
            "[http]\nhost = ' '",
            'F:2: key \'http.host\': must not be empty; write "0.0.0.0" or "::" for all addresses',
        ),
        (
            "[cache]\nblock_size = 17",
            "F:2: key 'cache.block_size': must be in [8, 16, 32, 64, 128] (got 17)",
        ),
        ("[cache]\nmemory = 0", "F:2: key 'cache.memory': must be at least 1 byte: 0"),
        ("[cache]\nmemory = '0 GiB'", "F:2: key 'cache.memory': must be at least 1 byte: 0 GiB"),
        (
            "[cache]\nmemory = 'lots'",
            "F:2: key 'cache.memory': 'lots' is no size; write bytes, or a number and a unit as in "
            '2GiB, or "auto"',
        ),
        ("[http]\nfd = 2", "F:2: key 'http.fd': must be >= 3: 2"),
        (
            "[http]\nuds = '/run/a'\nfd = 3",
            "F:3: key 'http.fd': cannot go with http.uds (F:2); leave one out",
        ),
        (
            "[http]\nport = 1\nport = 2",
            "F:3: key 'http.port': written twice, first on line 2; keep one",
        ),
        (
            "[http]\nport = 1\n[log]\n[http]",
            "F:4: key 'http': written twice, first on line 1; keep one",
        ),
        (
            "[http]\nhost = 'a'\nhost = '''a\nb'''\nport = 1",
            "F:3: key 'http.host': written twice, first on line 2; keep one",
        ),
        ("[http]\nport = \n", "F:2:8: not valid TOML: Invalid value"),
        (
            "[http\nport = 1\n",
            "F:1:6: not valid TOML: Expected ']' at the end of a table declaration",
        ),
        ("port", "F:1:5: not valid TOML: Expected '=' after a key in a key/value pair"),
    ],
)
def test_st_03_a_fault_in_the_file_is_one_line_with_place_and_remedy(
    write: Write, text: str, problem: str
) -> None:
    assert faults(write(text)) == [problem]


def test_all_faults_of_all_layers_come_at_once(write: Write) -> None:
    path = write("[http]\nport = 'x'\nprot = 1\n[cache]\nmemory = 'y'\n")
    assert faults(path, env={"TRIOSERVE_LOG__LEVEL": "x"}, overrides={"a.b": 1}) == [
        "F:3: key 'http.prot': unknown; did you mean 'port'?",
        f"--set a.b: section [a]: unknown; known are {', '.join(KEYS)}",
        "F:2: key 'http.port': expected an integer, got \"x\"",
        'TRIOSERVE_LOG__LEVEL: key \'log.level\': expected "debug", "info", "warning" or '
        '"error", got "x"',
        "F:5: key 'cache.memory': 'y' is no size; write bytes, or a number and a unit as in 2GiB, "
        'or "auto"',
    ]


def test_a_fault_is_told_also_where_a_stronger_layer_has_a_good_value(write: Write) -> None:
    [problem] = faults(write("[http]\nport = 'x'"), overrides={"http.port": 1})
    assert problem.startswith("F:2: key 'http.port'")


def test_a_faulty_value_has_no_faults_by_what_it_replaces(write: Write) -> None:
    path = write("[http]\nuds = '/run/a'\nfd = 3\n")
    assert faults(path, overrides={"http.uds": "\0"}) == [
        "--set http.uds: key 'http.uds': holds a NUL character"
    ]


def test_secrets_are_not_in_messages(write: Write) -> None:
    [problem] = faults(write("[model]\nhf_token = 12345678"))
    assert "12345678" not in problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.toml", "no such file"),
        ("hf:org/name", "no such file; to serve it as a model use --model hf:org/name"),
        (
            "folder",
            "is a directory, not a configuration file; to serve a model from it use --model",
        ),
        ("file/x.toml", "cannot be read: Not a directory"),
        ("zero", "over 1 MiB, so no configuration file"),
        ("weights.gguf", "not UTF-8 text; to serve it as a model use --model"),
        ("deep.toml", "not valid TOML: nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF\n\xff\xff")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    [found] = faults(Path(name))
    assert found.startswith("F:2: " if name == "weights.gguf" else "F: ")
    assert problem in found


def test_an_unreadable_file() -> None:
    # Address 0 cannot be read, by nobody; file modes do not stop root.
    assert faults(Path("/proc/self/mem")) == ["F: cannot be read: Input/output error"]


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("TRIOSERVE_HTTP__PRT", "1", ": key 'http.prt': unknown; did you mean 'port'?"),
        (
            "TRIOSERVE_HTTP__MAX_NUM_SEQS",
            "1",
            ": key 'http.max_num_seqs': unknown; 'max_num_seqs' belongs in section [scheduler]",
        ),
        ("TRIOSERVE_HTTP_PORT", "1", ": no such setting; did you mean TRIOSERVE_HTTP__PORT?"),
        ("TRIOSERVE_PORT", "1", ": no such setting; did you mean TRIOSERVE_HTTP__PORT?"),
        ("trioserve_http__port", "1", ": no such setting; did you mean TRIOSERVE_HTTP__PORT?"),
        ("TRIOSERVE_QQQ", "1", ": no such setting; names are TRIOSERVE_SECTION__KEY"),
        ("TRIOSERVE_HTTP__PORT", "x", ": key 'http.port': expected an integer, got \"x\""),
        ("TRIOSERVE_HTTP__HOST", "\udcff", ": key 'http.host': is not valid UTF-8"),
    ],
)
def test_a_variable_with_a_fault(variable: str, text: str, problem: str) -> None:
    assert faults(env={variable: text}) == [variable + problem]


def test_variables_of_others_are_left_alone() -> None:
    env = {
        "PATH": "x",
        "TRIOSERVE": "x",
        "TRIOSERVE_VENV": "x",
        "TRIOSERVE_PYTHON": "x",
        # A service named trioserve in the same name space of Kubernetes.
        "TRIOSERVE_SERVICE_HOST": "10.0.0.1",
        "TRIOSERVE_SERVICE_PORT": "8000",
        "TRIOSERVE_SERVICE_PORT_HTTP": "8000",
        "TRIOSERVE_PORT": "tcp://10.0.0.1:8000",
        "TRIOSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TRIOSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load(None, env=env, overrides={}).config == Config()


@pytest.mark.parametrize("dotted", ["port", "http", "http.", ".port", "http.port.x", "", "."])
def test_an_override_without_a_key(dotted: str) -> None:
    [problem] = faults(overrides={dotted: "1"})
    assert problem.startswith(f"--set {dotted}: ")


# ---------------------------------------------------------------------------- who wins


def test_st_03_flag_beats_environment_beats_file_beats_default(write: Write) -> None:
    path = write("[http]\nport = 1\nhost = 'file'\n[log]\n\nlevel = 'error'\n")
    loaded = load(
        path,
        env={"TRIOSERVE_HTTP__PORT": "2", "TRIOSERVE_HTTP__HOST": "env"},
        overrides={"http.port": Text("3", where="--port"), "log.format": "json"},
    )
    assert (loaded.config.http.port, loaded.config.http.host) == (3, "env")
    assert (loaded.config.log.level, loaded.config.log.format) == ("error", "json")
    assert loaded.config.model == Config().model
    assert {k: str(o) for k, o in loaded.origins.items() if o.layer != "default"} == {
        "http.host": "TRIOSERVE_HTTP__HOST",
        "http.port": "--port",
        "log.level": f"{path}:6",
        "log.format": "--set log.format",
    }
    assert loaded.origins.keys() == {key.dotted for key in all_keys()}
    assert loaded.describe_non_defaults() == (
        'http.host="env" (TRIOSERVE_HTTP__HOST), http.port=3 (--port), '
        f'log.level="error" ({path}:6), log.format="json" (--set log.format)'
    )


def test_nothing_given_is_the_default() -> None:
    loaded = load(None, env={}, overrides={})
    assert loaded.config == Config()
    assert loaded.non_defaults() == {}
    assert loaded.describe_non_defaults() == ""


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            {"http.port": 80, "http.uds": "/run/a"},
            "--set http.port: key 'http.port': has no effect with http.uds (--set http.uds); "
            "leave one out",
        ),
        (
            {"http.host": "::", "http.fd": 3},
            "--set http.host: key 'http.host': has no effect with http.fd (--set http.fd); "
            "leave one out",
        ),
        (
            {"device.simulated_step_s": 1},
            "--set device.simulated_step_s: key 'device.simulated_step_s': has no effect with "
            'device.kind = "auto"; it takes "simulated"',
        ),
    ],
)
def test_a_flag_that_another_makes_useless(overrides: dict[str, object], problem: str) -> None:
    assert faults(overrides=overrides) == [problem]


def test_a_stronger_layer_may_choose_another_listener_or_device(write: Write) -> None:
    path = write("[http]\nport = 80\n[device]\nkind = 'simulated'\nsimulated_step_s = 1\n")
    env = {"TRIOSERVE_HTTP__HOST": "::", "TRIOSERVE_DEVICE__SIMULATED_LOAD_S": "1"}
    loaded = load(path, env=env, overrides={"http.uds": "/run/a", "device.kind": "cpu"})
    assert loaded.config.http.uds == "/run/a"
    assert loaded.config.device.kind == "cpu"


def test_an_empty_text_unsets(write: Write) -> None:
    path = write("[http]\nuds = '/run/a'\nfd = 3\n[model]\nhf_token = 'x'\n")
    loaded = load(path, env={"TRIOSERVE_MODEL__HF_TOKEN": ""}, overrides={"http.fd": ""})
    assert (loaded.config.http.fd, loaded.config.model.hf_token) == (None, None)


@pytest.mark.parametrize(
    ("dotted", "text", "value"),
    [
        ("http.port", "0x1F90", 8080),
        ("http.port", " 80 ", 80),
        ("http.http2", "true", True),
        ("engine.drain_timeout_s", "5", 5.0),
        ("engine.drain_timeout_s", "5e-1", 0.5),
        ("engine.threads", "4", 4),
        ("engine.threads", "auto", "auto"),
        ("cache.memory", "1024", 1024),
        ("cache.memory", "2GiB", "2GiB"),
        ("cache.memory", '"2GiB"', "2GiB"),
        ("http.host", "::1", "::1"),
        ("http.host", "127", "127"),
        ("model.hf_token", "123", "123"),
        ("model.hf_token", "true", "true"),
        ("model.hf_token", "a = b # c", "a = b # c"),
        ("model.served_names", "a, b/c", ("a", "b/c")),
        ("model.served_names", "['a,b', \"c\"]", ("a,b", "c")),
        ("model.served_names", "", ()),
        ("model.source", "random:llama?layers=2#x", "random:llama?layers=2#x"),
    ],
)
def test_text_is_read_by_the_type_of_its_key(dotted: str, text: str, value: object) -> None:
    found = setting(dotted, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("dotted", "text", "problem"),
    [
        ("http.port", "8o", 'expected an integer, got "8o"'),
        ("http.port", "", 'expected an integer, got ""'),
        ("http.port", "1\ny = 2", 'expected an integer, got "1\\ny = 2"'),
        ("http.port", "-1", "must be >= 0: -1"),
        ("http.http2", "yes", 'expected true or false, got "yes"'),
        ("http.fd", "1", "must be >= 3: 1"),
        ("device.memory_fraction", "1.5", "must be <= 1.0: 1.5"),
        ("device.memory_fraction", "0", "must be > 0.0: 0.0"),
        ("model.source", "", "must not be empty"),
    ],
)
def test_text_that_does_not_fit(dotted: str, text: str, problem: str) -> None:
    assert fault_of(dotted, text) == problem


def test_values_of_a_program_are_taken_exactly() -> None:
    names = load(None, env={}, overrides={"model.served_names": ("a",), "http.uds": None})
    assert names.config.model.served_names == ("a",)
    assert names.config.http.uds is None
    [problem] = faults(overrides={"http.http2": 1})
    assert problem == "--set http.http2: key 'http.http2': expected true or false, got 1"


# ---------------------------------------------------------------------------- paths


def test_paths_in_a_file_start_at_the_file_all_others_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/m.toml").write_text(
        "[model]\nsource = './weights'\ntokenizer = '../t.json'\nchat_template = '/abs/x'\n"
        "[http]\nuds = 'sock'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/nobody")
    loaded = load(
        Path("conf/m.toml"),
        env={"TRIOSERVE_MODEL__TOKENIZER": "u.json"},
        overrides={"model.cache_dir": "~/c"},
    )
    model = loaded.config.model
    assert model.source == f"{tmp_path}/conf/weights"
    assert model.tokenizer == f"{tmp_path}/u.json"
    assert model.chat_template == "/abs/x"
    assert model.cache_dir == "/home/nobody/c"
    assert loaded.config.http.uds == f"{tmp_path}/conf/sock"


def test_a_file_from_a_pipe_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write("[model]\nsource = 'weights'\n")
    try:
        loaded = load(Path(f"/dev/fd/{reader}"), env={}, overrides={})
    finally:
        os.close(reader)
    assert loaded.config.model.source == f"{tmp_path}/weights"


@pytest.mark.parametrize("source", ["hf:org/name@main", "wheel:d==1#a/b", "random:llama?a=b"])
def test_a_source_with_a_scheme_is_no_path(write: Write, source: str) -> None:
    path = write(f"[model]\nsource = '{source}'")
    assert load(path, env={}, overrides={}).config.model.source == source


def test_a_socket_path_that_the_kernel_would_refuse() -> None:
    assert setting("http.uds", "/" + "x" * 106) == "/" + "x" * 106
    assert "longer than a socket's path may be" in fault_of("http.uds", "/" + "x" * 107)


def test_byte_order_mark_and_dos_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_bytes(b"\xef\xbb\xbf[http]\r\nport = 80\r\n")
    loaded = load(path, env={}, overrides={})
    assert loaded.config.http.port == 80
    assert str(loaded.origins["http.port"]) == f"{path}:2"


# ---------------------------------------------------------------------------- printing


def back(loaded: LoadedConfig, tmp_path: Path) -> LoadedConfig:
    path = tmp_path / "printed.toml"
    path.write_text(to_toml(loaded), encoding="utf-8")
    return load(path, env={}, overrides={})


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
)


@given(
    host=TEXTS.filter(str.strip),
    names=st.lists(TEXTS.filter(str.strip), unique=True, max_size=3),
    source=TEXTS.filter(str.strip),
    port=st.integers(0, 65535),
    wait=st.floats(0, 1e300),
    threads=st.just("auto") | st.integers(1, 2**62),
)
@settings(max_examples=60)
def test_printed_configuration_loads_back_to_itself(
    tmp_path_factory: pytest.TempPathFactory, **values: Any
) -> None:
    keys = {
        "host": "http.host",
        "names": "model.served_names",
        "source": "model.source",
        "port": "http.port",
        "wait": "engine.drain_timeout_s",
        "threads": "engine.threads",
    }
    overrides = {keys[name]: value for name, value in values.items()}
    # A text would be read as TOML where it can be; in an array it is taken as it is.
    strings = {
        k: Text(f'"{_escaped(v)}"', where="test") if isinstance(v, str) else v
        for k, v in overrides.items()
    }
    try:
        loaded = load(None, env={}, overrides=strings)
    except ConfigError as error:
        assert "home" in str(error)  # noqa: PT017 - a source like ~name has nobody's home to go to
        return
    assert loaded.config.http.host == values["host"]
    assert back(loaded, tmp_path_factory.mktemp("printed")).config == loaded.config


def _escaped(text: str) -> str:
    return "".join(f"\\U{ord(c):08x}" for c in text)


def test_printed_defaults_name_every_key_and_load_back(tmp_path: Path) -> None:
    text = to_toml(load(None, env={}, overrides={}))
    assert back(load(None, env={}, overrides={}), tmp_path).config == Config()
    assert tomllib.loads(text)["http"]["port"] == 8000
    for key in all_keys():
        assert f"\n{key.name} " in text or f"\n# {key.name} " in text
    assert "# uds is not set  # default" in text


def test_secrets_are_not_printed_and_not_loaded_back_as_stars(tmp_path: Path) -> None:
    loaded = load(None, env={"TRIOSERVE_MODEL__HF_TOKEN": "hunter2"}, overrides={})
    assert loaded.config.model.hf_token == "hunter2"
    text = to_toml(loaded)
    assert "hunter2" not in text + loaded.describe_non_defaults()
    assert '# hf_token = "***"  # TRIOSERVE_MODEL__HF_TOKEN' in text
    assert back(loaded, tmp_path).config.model.hf_token is None


def test_an_odd_file_name_cannot_break_the_print(tmp_path: Path) -> None:
    path = tmp_path / "a\nb = 1"
    path.write_text("[http]\nport = 1")
    assert tomllib.loads(to_toml(load(path, env={}, overrides={})))["http"]["port"] == 1


def test_the_configuration_is_frozen() -> None:
    config = load(None, env={}, overrides={}).config
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.http.port = 1  # type: ignore[misc]
