"""Whatever a body holds, the answer is a 2xx or a 4xx with the right shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioserve.http.errors import InvalidBody
from trioserve.http.schema import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    SHARED_NEUTRAL,
    WITHOUT_EFFECT,
    GenerationRequest,
    parse_chat,
    parse_completion,
)

from . import honoured
from .bodies import CHAT, COMPLETION, is_error
from .client import serving

NAMES = sorted(
    {*honoured.COMPLETION, *honoured.CHAT, *SHARED_NEUTRAL, *CHAT_NEUTRAL, *COMPLETION_NEUTRAL}
    | {*WITHOUT_EFFECT}
)

numbers = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(st.text(max_size=5), st.lists(st.integers(0, 300), max_size=4)),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "x"]), "content": values}),
        max_size=3,
    ),
    "n": st.integers(0, 3),
    "stream": st.booleans(),
    "stop": st.one_of(st.text(max_size=2), st.lists(st.text(max_size=2), max_size=3)),
    "temperature": st.floats(0, 2),
    "echo": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 3)),
    "top_logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 3),
    "max_tokens": st.integers(0, 9),
    "best_of": st.integers(0, 4),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.integers(-110, 110)),
    "allowed_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "logprob_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "bad_words": st.lists(st.text(max_size=2), max_size=3),
    "truncate_prompt_tokens": st.integers(-1, 4),
    "truncation_side": st.sampled_from(["left", "right"]),
    "return_token_ids": st.booleans(),
    "include_timings": st.booleans(),
    "stream_options": st.dictionaries(
        st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()
    ),
    "documents": st.lists(st.dictionaries(st.text(max_size=3), leaves), max_size=2),
    "reasoning_effort": st.sampled_from(["none", "low", "x"]),
    "continue_final_message": st.booleans(),
    "request_id": st.text(max_size=3),
}
bodies = st.fixed_dictionaries(
    {}, optional={name: st.one_of(values, plausible.get(name, values)) for name in NAMES}
)
good_bodies = st.fixed_dictionaries(
    {"prompt": plausible["prompt"], "messages": plausible["messages"]},
    optional={
        name: plausible.get(name, st.none()) for name in NAMES if name not in ("prompt", "messages")
    },
)


def encode(body: Any) -> bytes:
    return json.dumps(body).encode(errors="surrogatepass")


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(body=st.one_of(bodies, good_bodies, values), raw=st.one_of(st.none(), st.binary()))
def test_api_10_fuzz_parsers(body: Any, raw: bytes | None) -> None:
    for parse in (parse_completion, parse_chat):
        parsed: GenerationRequest | InvalidBody
        try:
            parsed = parse(encode(body) if raw is None else raw)
        except InvalidBody as error:
            parsed = error
        if isinstance(parsed, InvalidBody):
            assert parsed.message
            assert parsed.status == 400
        else:
            assert parsed.num_choices >= 1
            parsed.sampling.validate(2**64)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_api_10_fuzz_server(path: str) -> None:
    samples: list[bytes] = []

    @settings(max_examples=120, database=None)
    @given(body=st.one_of(bodies, good_bodies))
    def collect(body: Any) -> None:
        samples.append(encode(body))

    collect()
    async with serving() as served:
        client = await served.connect()
        for raw in samples:
            await client.send("POST", path, raw)
            answer = await client.answer()
            assert answer.status in (200, 400, 404), raw
            if answer.status != 200:
                assert answer.json["error"]["message"]
        good = COMPLETION if path == "/v1/completions" else CHAT
        assert (await served.call("POST", path, good)).status == 200


hostile = st.one_of(
    st.sampled_from(
        [
            *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1E400", b"0x1", b"01", b"1.", b"+1", b"'a'"),
            *(b"9" * 5000, b"1e-999", b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xff"', b'"\x00"'),
            *(b'{"a":1,"a":2}', b'{"a":1,"\\u0061":2}', b"undefined", b"[1,]", b"{,}", b'"', b"\\"),
            b"[" * 5000 + b"]" * 5000,
            b'{"a":' * 500 + b"1" + b"}" * 500,
            b"[" + b"[]," * 60_000 + b"1]",
        ]
    ),
    st.binary(max_size=20),
    st.integers(90, 110).map(lambda depth: b"[" * depth + b"]" * depth),
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_api_10_fuzz_raw_bytes_in_place_of_a_value(path: str) -> None:
    """Syntax that a decoder might let pass never reaches a handler that is not made for it."""
    samples: list[bytes] = []
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}

    @settings(max_examples=150, database=None)
    @given(
        name=st.sampled_from(NAMES), raw=hostile, after=st.sampled_from([b"", b"}", b" 1", b","])
    )
    def collect(name: str, raw: bytes, after: bytes) -> None:
        start = json.dumps(body).encode()[:-1]
        samples.append(start + b', "' + name.encode() + b'": ' + raw + b"}" + after)

    collect()
    async with serving() as served:
        client = await served.connect()
        for raw in samples:
            await client.send("POST", path, raw)
            answer = await client.answer()
            assert answer.status in (200, 400, 404), raw
            assert answer.status == 200 or is_error(answer.json), raw
        assert (await served.call("POST", path, COMPLETION | CHAT)).status == 200


async def test_api_10_fuzz_heads() -> None:
    """Methods, media types and bodies that do not belong together."""
    samples: list[tuple[str, str, dict[str, str], bytes | None]] = []

    @settings(max_examples=150, database=None)
    @given(
        method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "X"]),
        path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/none", "/", "//"]),
        kind=st.one_of(
            st.sampled_from(
                ["application/json", "text/plain", "a/b+json", "", ";", "x/y;charset=z"]
            ),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12),
        ),
        body=st.one_of(st.none(), st.binary(max_size=9), st.just(b'{"prompt": "a"}')),
    )
    def collect(method: str, path: str, kind: str, body: bytes | None) -> None:
        samples.append((method, path, {"Content-Type": kind}, body))

    collect()
    async with serving() as served:
        for method, path, headers, body in samples:
            if method == "HEAD":
                continue  # has no body to look at
            answer = await served.call(method, path, body, **headers)
            assert answer.status in (200, 204, 400, 404, 405, 415), (method, path, headers, body)
            if answer.status >= 400:
                assert is_error(answer.json)
        assert (await served.call("POST", "/v1/completions", COMPLETION)).status == 200
