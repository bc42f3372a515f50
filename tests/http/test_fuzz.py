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

from .client import serving

HONOURED = [
    *("prompt", "messages", "model", "n", "stream", "stream_options", "max_tokens", "min_tokens"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs", "top_logprobs"),
    *("echo", "priority", "cache_salt", "add_special_tokens", "add_generation_prompt"),
    *("chat_template_kwargs", "best_of", "timeout_s", "queue_timeout_s"),
]
NAMES = [*HONOURED, *SHARED_NEUTRAL, *CHAT_NEUTRAL, *COMPLETION_NEUTRAL, *WITHOUT_EFFECT]

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
}
bodies = st.fixed_dictionaries(
    {}, optional={name: st.one_of(values, plausible.get(name, values)) for name in NAMES}
)
good_bodies = st.fixed_dictionaries(
    {"prompt": plausible["prompt"], "messages": plausible["messages"]},
    optional={name: st.one_of(st.none(), values) for name in HONOURED[2:]},
)


def encode(body: Any) -> bytes:
    return json.dumps(body).encode(errors="surrogatepass")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
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

    @settings(max_examples=120, deadline=None, database=None)
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
        good = (
            {"prompt": "a"}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "a"}]}
        )
        assert (await served.call("POST", path, good)).status == 200
