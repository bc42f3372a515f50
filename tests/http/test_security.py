"""Who may ask: API keys on every route, their file, what is never told."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.config.schema import Config, HttpConfig
from trioserve.errors import ConfigError
from trioserve.http import auth, guard, reloading
from trioserve.http.app import make_app
from trioserve.http.auth import ApiKeys
from trioserve.http.guard import ALWAYS_OPEN, Guard

from .client import Answer, Client, request_bytes, serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory

KEY, OTHER = "sk-first-0123456789", "sk-second-abcdef"
COMPLETION = {"prompt": "hi"}
EVERYTHING = Config(http=HttpConfig(admin=True, api_keys=(KEY,)))


def routes() -> list[tuple[str, str]]:
    """Method and path of every route there can be, arguments filled in."""
    app = make_app(FakeEngine(), EVERYTHING, trio.Event())
    found = []
    for rule in app.url_map.iter_rules():
        path = rule.rule
        while "<" in path:
            before, _, rest = path.partition("<")
            path = before + "x" + rest.partition(">")[2]
        found += [(method, path) for method in sorted(rule.methods or ())]
    return found


async def send_raw(client: Client, lines: list[bytes]) -> Answer:
    await client.stream.send_all(b"\r\n".join([*lines, b"Host: x", b"", b""]))
    return await (client.head() if lines[0].startswith(b"HEAD") else client.answer())


def is_refused(answer: Answer, path: str = "/") -> bool:
    """401 in the shape of the API, telling nothing else."""
    if answer.status != 401:
        return False
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert "allow" not in answer.headers
    if not answer.body:
        return True
    if path.startswith("/v1/messages"):
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "authentication_error"
    else:
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert answer.json["error"]["code"] in ("invalid_api_key", "missing_api_key")
    return True


# ---------------------------------------------------------------------- OP-02: every route


async def test_op_02_every_route_needs_a_key_unless_it_is_known_as_open() -> None:
    """A route added later is closed: only what is listed here by name may answer without."""
    open_paths = {"/health", "/health/live", "/health/ready", "/ping"}
    assert open_paths == ALWAYS_OPEN
    table = routes()
    assert len(table) > 20
    assert {"/v1/chat/completions", "/metrics", "/startup", "/version"} <= {p for _, p in table}
    async with serving(admin=True, api_keys=(KEY,)) as served:
        for method, path in table:
            client = await served.connect()
            lines = [f"{method} {path} HTTP/1.1".encode(), b"Content-Length: 0"]
            answer = await send_raw(client, lines)
            assert is_refused(answer, path) != (path in open_paths), (method, path)
            client = await served.connect()
            answer = await send_raw(client, [*lines, b"Authorization: Bearer wrong"])
            assert is_refused(answer, path) != (path in open_paths), (method, path)
        assert served.engine.streams == []
        assert not served.stopping.is_set()


def changed(path: str) -> list[str]:
    return [
        "/" + path,
        path.upper(),
        path + "/",
        "/x/.." + path,
        "/health/.." + path,
        "/health%2f.." + path,
        path.replace("/v1/", "/v1%2F"),
        path.replace("v1", "%761"),
        path + ";/health",
        path + "?/health",
        path + "%3f/health",
        path + "%00",
        path + "%0d%0a/health",
        "http://x" + path,
        "http://x/health/.." + path,
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health/live"])
async def test_op_02_no_spelling_of_a_path_goes_around_the_key(path: str) -> None:
    async with serving(api_keys=(KEY,)) as served:
        for spelling in changed("/v1/completions" if path == "/health/live" else path):
            for method in (b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"BREW"):
                client = await served.connect()
                line = b"%b %b HTTP/1.1" % (method, spelling.encode())
                assert is_refused(await send_raw(client, [line])), (method, spelling)
        assert served.engine.streams == []


@pytest.mark.parametrize("path", ["/nowhere", "/v1/completions/", "/health/livex", "/health/"])
async def test_op_02_unknown_paths_tell_nothing_either(path: str) -> None:
    async with serving(api_keys=(KEY,)) as served:
        assert is_refused(await served.call("GET", path))
        assert (await served.call("GET", path, Authorization=f"Bearer {KEY}")).status == 404


ACCEPTED: list[list[bytes]] = [
    [b"Authorization: Bearer " + KEY.encode()],
    [b"authorization: bearer   " + KEY.encode() + b"  "],
    [b"AUTHORIZATION: BEARER " + OTHER.encode()],
    [b"x-api-key: " + KEY.encode()],
    [b"X-API-KEY:" + OTHER.encode()],
    [b"Authorization: Bearer dummy", b"x-api-key: " + KEY.encode()],
    [b"Authorization: Basic eDp5", b"x-api-key: " + KEY.encode()],
]
REFUSED: list[list[bytes]] = [
    [],
    [b"Authorization: " + KEY.encode()],
    [b"Authorization: Basic " + KEY.encode()],
    [b"Authorization: Token " + KEY.encode()],
    [b"Authorization: Bearer"],
    [b"Authorization: Bearer "],
    [b"Authorization:"],
    [b"x-api-key:"],
    [b"x-api-key: Bearer " + KEY.encode()],
    [b"Authorization: Bearer " + KEY.upper().encode()],
    [b"Authorization: Bearer " + KEY[:-1].encode()],
    [b"Authorization: Bearer " + KEY.encode() + b"x"],
    [b"Authorization: Bearer " + KEY.encode() + b" " + KEY.encode()],
    [b"Authorization: Bearer " + KEY.encode() + b"," + OTHER.encode()],
    [b"Authorization: Bearer \xff\xfe" + KEY.encode()],
    [b"Authorization: Bearer k\xc3\xa9y"],
    [b"Authorization: Bearer " + b"k" * 12000],
    [b"Authorization: Bearer " + KEY.encode()] * 2,
    [b"Authorization: Bearer " + KEY.encode(), b"Authorization: Bearer " + OTHER.encode()],
    [b"Authorization: Bearer wrong", b"Authorization: Bearer " + KEY.encode()],
    [b"x-api-key: " + KEY.encode()] * 2,
    [b"api-key: " + KEY.encode()],
    [b"Cookie: authorization=Bearer " + KEY.encode()],
]


@pytest.mark.parametrize("headers", ACCEPTED, ids=range(len(ACCEPTED)))
async def test_op_02_keys_that_open(headers: list[bytes]) -> None:
    async with serving(api_keys=(KEY, OTHER)) as served:
        answer = await send_raw(await served.connect(), [b"GET /v1/models HTTP/1.1", *headers])
        assert answer.status == 200


@pytest.mark.parametrize("headers", REFUSED, ids=range(len(REFUSED)))
async def test_op_02_keys_that_do_not(headers: list[bytes]) -> None:
    async with serving(api_keys=(KEY, OTHER)) as served:
        client = await served.connect()
        assert is_refused(await send_raw(client, [b"GET /v1/models HTTP/1.1", *headers]))


async def test_op_02_all_keys_are_compared_whatever_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(
        auth.hmac, "compare_digest", lambda a, b: compared.append(len(b)) or real(a, b)
    )
    keys = ApiKeys([KEY, OTHER, "third"], None)
    for presented in (KEY, OTHER, "third", "none", ""):
        compared.clear()
        keys.refuse([b"Bearer " + presented.encode()], [])
        assert compared == [32, 32, 32]  # digests of one length


async def test_op_02_a_refused_body_is_not_read() -> None:
    async with serving(api_keys=(KEY,)) as served:
        client = await served.connect()
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n"
        )
        assert is_refused(await client.answer())


async def test_op_02_a_connection_goes_on_after_a_refusal() -> None:
    async with serving(api_keys=(KEY,)) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        assert is_refused(await client.answer())
        await client.send("POST", "/v1/completions", COMPLETION, Authorization=f"Bearer {KEY}")
        assert (await client.answer()).status == 200
        await client.send("POST", "/v1/completions", COMPLETION)
        assert is_refused(await client.answer())


async def test_op_02_websockets_over_http2_meet_no_handler() -> None:
    sent: list[Any] = []
    app = make_app(FakeEngine(), EVERYTHING, trio.Event())

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b""}
    await app(scope, trio.sleep_forever, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_open_routes_are_opened_by_their_exact_path() -> None:
    async with serving(api_keys=(KEY,), open_routes=("/metrics",)) as served:
        assert (await served.call("GET", "/metrics")).status == 200
        assert is_refused(await served.call("GET", "/metrics/"))
        assert is_refused(await served.call("GET", "/startup"))


def test_an_open_route_that_does_not_exist_is_refused() -> None:
    config = Config(http=HttpConfig(open_routes=("/metrisc",)))
    with pytest.raises(ConfigError, match=r"no route '/metrisc'; did you mean /metrics\?"):
        trio.run(in_trio, lambda: make_app(FakeEngine(), config, trio.Event()))


async def in_trio(call: Any) -> None:
    call()


async def test_without_keys_everything_is_open() -> None:
    async with serving() as served:
        assert (await served.call("GET", "/metrics")).status == 200
        answer = await served.call("POST", "/v1/completions", COMPLETION, Authorization="Bearer x")
        assert answer.status == 200


async def test_official_clients_present_keys_and_know_the_refusal() -> None:
    import anthropic
    import openai

    async with serving(api_keys=(KEY,)) as served:
        url = f"http://127.0.0.1:{served.port}"
        messages: list[Any] = [{"role": "user", "content": "hi"}]

        def ask_openai(key: str) -> str | None:
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
                answer = client.chat.completions.create(model="fake", messages=messages)
                return answer.choices[0].message.content

        def ask_anthropic(**key: str) -> str:
            with anthropic.Anthropic(base_url=url, **key) as client:  # type: ignore[arg-type]
                answer = client.messages.create(model="fake", max_tokens=9, messages=messages)
                return str(getattr(answer.content[0], "text", None))

        def in_thread(call: Any, *args: Any, **kwargs: Any) -> Any:
            return trio.to_thread.run_sync(functools.partial(call, *args, **kwargs))

        assert await in_thread(ask_openai, KEY) == "Hello world"
        assert await in_thread(ask_anthropic, api_key=KEY) == "Hello world"
        assert await in_thread(ask_anthropic, auth_token=KEY) == "Hello world"
        with pytest.raises(openai.AuthenticationError, match="not known here") as refused:
            await in_thread(ask_openai, "wrong")
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(anthropic.AuthenticationError, match="not known here"):
            await in_thread(ask_anthropic, api_key="wrong")
        assert len(served.engine.streams) == 3


# ------------------------------------------------------------------------------ secrets


async def test_keys_are_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(api_keys=(KEY,)) as served:
        wrong = await served.call("GET", "/v1/models", Authorization="Bearer presented-secret")
        right = f"Bearer {KEY}"
        answers = [
            wrong,
            await served.call("GET", "/startup", Authorization=right),
            await served.call("GET", "/metrics", Authorization=right),
            await served.call("GET", "/nowhere", Authorization=right),
            await served.call("POST", "/v1/completions", {"prompt": 1}, Authorization=right),
        ]
        told = b"".join(answer.body for answer in answers).decode() + str(
            [answer.headers for answer in answers]
        )
        assert KEY not in told
        assert "presented-secret" not in told
        assert KEY not in caplog.text
        assert "presented-secret" not in caplog.text
        assert KEY not in repr(vars(ApiKeys([KEY], None)))


async def test_refused_keys_are_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, autojump_clock: object
) -> None:
    async with serving_in_memory(api_keys=(KEY,)) as served:
        client = served.connect()
        for pause_s in (0.0, 0.0, 0.0, guard.TOLD_S, 0.0):
            await trio.sleep(pause_s)
            await client.send("GET", "/v1/models")
            assert (await client.answer()).status == 401
    told = [r.getMessage() for r in caplog.records if "API key" in r.getMessage()]
    assert told == [
        "1 requests without a valid API key; the last from 127.0.0.1",
        "3 requests without a valid API key; the last from 127.0.0.1",
    ]


# ----------------------------------------------------------------------------- the file


def write_keys(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


async def test_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, f"\ufeff# ours\r\n{KEY}\r\n\r\n  {OTHER}   # of the batch job\n\t# none\n")
    keys = ApiKeys(["fixed"], str(path))
    for key in (KEY, OTHER, "fixed"):
        assert keys.refuse([b"Bearer " + key.encode()], []) is None
    for key in ("# ours", "#", "of", ""):
        assert keys.refuse([], [key.encode()]) is not None


BAD_FILES = {
    "": "holds no key",
    "# nothing\n\n": "holds no key",
    f"{KEY}\nsk one two\n": "line 2 is no key",
    "schlüssel\n": "line 1 is no key",
    "a\0b\n": "line 1 is no key",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_file_of_keys_ends_the_start(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, text)
    with pytest.raises(ConfigError, match=BAD_FILES[text]) as caught:
        ApiKeys([], str(path))
    assert str(path) in str(caught.value)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_of_keys_that_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"k" * (auth.MAX_FILE_BYTES + 1))
    for name, fault in [
        ("missing", "No such file"),
        ("", "not a regular file|Is a directory"),
        ("fifo", "not a regular file"),
        ("large", "over 1 MiB"),
    ]:
        with pytest.raises(ConfigError, match=fault):
            ApiKeys([], str(tmp_path / name))


def test_file_that_others_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    write_keys(path, KEY)
    ApiKeys([], str(path))
    assert caplog.text == ""
    path.chmod(0o604)
    ApiKeys([], str(path))
    assert "can be read by every user" in caplog.text


async def test_keys_change_with_their_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: object
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    write_keys(path, KEY)
    async with serving_in_memory(api_keys_file=str(path)) as served:
        client = served.connect()

        async def opens(key: str) -> bool:
            await client.send("GET", "/v1/models", x_api_key=key)
            return (await client.answer()).status == 200

        assert await opens(KEY)
        assert not await opens(OTHER)
        write_keys(path, f"{OTHER}\n")
        await trio.sleep(reloading.LOOK_EVERY_S)
        assert not await opens(KEY)
        assert await opens(OTHER)

        for text in BAD_FILES:
            write_keys(path, text)
            await trio.sleep(reloading.LOOK_EVERY_S)
            assert await opens(OTHER)
            assert not await opens("")
            assert not await opens(KEY)
        path.unlink()
        for _ in range(3):
            await trio.sleep(reloading.LOOK_EVERY_S)
            assert await opens(OTHER)
        told = [r.getMessage() for r in caplog.records if "stay in use" in r.getMessage()]
        assert len(told) == 4  # once for each new fault, not for each look

        new = tmp_path / "new"
        write_keys(new, KEY)
        new.rename(path)
        await trio.sleep(reloading.LOOK_EVERY_S)
        assert await opens(KEY)
        assert not await opens(OTHER)
        assert OTHER not in caplog.text
        assert KEY not in caplog.text


async def test_file_is_not_looked_at_for_each_request(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    write_keys(path, KEY)
    keys = ApiKeys([], str(path))
    looks = []
    real = reloading._fingerprint
    monkeypatch.setattr(reloading, "_fingerprint", lambda p: looks.append(p) or real(p))
    for _ in range(100):
        keys.refuse([b"Bearer x"], [])
    assert len(looks) == 1


# ------------------------------------------------------------------------------ exposure


class At:
    def __init__(self, *address: object) -> None:
        self._address = address if len(address) > 1 else address[0]
        self.socket = self

    def getsockname(self) -> object:
        return self._address


@pytest.mark.parametrize(
    ("listener", "exposed"),
    [
        (At("127.0.0.1", 1), False),
        (At("127.8.0.1", 1), False),
        (At("::1", 1, 0, 0), False),
        (At("::ffff:127.0.0.1", 1, 0, 0), False),
        (At("/run/x"), False),
        (At(b"\0abstract"), False),
        (At("0.0.0.0", 1), True),
        (At("::", 1, 0, 0), True),
        (At("10.1.2.3", 1), True),
        (At("fe80::1%eth0", 1, 0, 2), True),
    ],
)
def test_open_server_on_the_network_is_warned_about(
    listener: Any, exposed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    closed, opened = Guard(ApiKeys([KEY], None)), Guard(ApiKeys([], None))
    guard.check_exposure([listener], closed, admin=True)
    assert caplog.text == ""
    guard.check_exposure([listener], opened, admin=False)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * exposed
    if exposed:
        with pytest.raises(ConfigError, match=r"http\.admin = true on .* needs http\.api_keys"):
            guard.check_exposure([listener], opened, admin=True)
    else:
        guard.check_exposure([listener], opened, admin=True)


# --------------------------------------------------------------- pages of other origins


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "127.0.0.1:8000", 200),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
        ("http://localhost:8000", "localhost:8000", 200),
        ("http://[::1]:8000", "[::1]:8000", 200),
        ("https://evil.example", "127.0.0.1:8000", 403),
        ("http://localhost:3000", "localhost:8000", 403),
        ("null", "127.0.0.1:8000", 403),
        ("", "", 403),
        ("http://rebound.example:8000", "rebound.example:8000", 403),
        ("http://127.0.0.1.evil.example", "127.0.0.1.evil.example", 403),
    ],
)
async def test_a_page_of_another_origin_gets_nothing_done_without_a_key(
    origin: str | None, host: str, status: int
) -> None:
    """Any page a browser shows can send such a request to a loopback address."""
    async with serving() as served:
        headers = {"Host": host} | ({"Origin": origin} if origin is not None else {})
        answer = await served.call("POST", "/v1/completions", COMPLETION, **headers)
        assert answer.status == status
        assert len(served.engine.streams) == (status == 200)
        assert "access-control-allow-origin" not in answer.headers
        if status == 403:
            assert answer.json["error"]["code"] == "cross_origin"


async def test_a_page_with_a_key_may_be_of_any_origin() -> None:
    async with serving(api_keys=(KEY,)) as served:
        answer = await served.call(
            "POST",
            "/v1/completions",
            COMPLETION,
            Origin="https://proxy.example",
            Authorization=f"Bearer {KEY}",
        )
        assert answer.status == 200


def test_request_bytes_puts_headers_as_given() -> None:
    """What the tests above lean on."""
    assert b"x-api-key: k\r\n" in request_bytes("GET", "/", x_api_key="k")
