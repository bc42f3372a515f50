"""Models, metrics, large bodies; names carry ids of field failures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from trioserve.http.errors import InvalidBody
from trioserve.http.fields import decode_object
from trioserve.http.metrics import STATUS_CLASSES

from .bodies import BOTH, COMPLETION
from .client import serving
from .fake_engine import FakeEngine

# --------------------------------------------------------------------------------- models


async def test_models() -> None:
    async with serving() as served:
        cards = (await served.call("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in cards] == ["fake", "org/fake"]
        assert cards[0]["max_model_len"] == 2048
        assert (await served.call("GET", "/v1/models/org/fake")).json == cards[1]
        missing = await served.call("GET", "/v1/models/none")
        assert missing.status == 404
        assert missing.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_model_field(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        for model in ("fake", "org/fake", "", None):
            answer = await served.call("POST", path, body | {"model": model})
            assert answer.status == 200
            assert answer.json["model"] == "fake"
        answer = await served.call("POST", path, body | {"model": "gpt"})
        assert answer.status == 404
        error = answer.json["error"]
        assert error["param"] == "model"
        assert error["code"] == "model_not_found"
        assert "org/fake" in error["message"]


# -------------------------------------------------------------------------------- metrics


async def test_op_01_series_do_not_grow_with_requests() -> None:
    from prometheus_client.parser import text_string_to_metric_families as parse

    async with serving() as served:
        before = (await served.call("GET", "/metrics")).body.decode()
        client = await served.connect()
        for index in range(40):
            await client.send("GET", f"/random/{index}")
            await client.answer()
            await client.send("POST", "/v1/completions", COMPLETION | {"model": f'm{index}\n"'})
            await client.answer()
            await client.send(f"M{index}", "/version")
            await client.answer()
        after = (await served.call("GET", "/metrics")).body.decode()
        count = {text: sum(len(f.samples) for f in parse(text)) for text in (before, after)}
        assert count[before] == count[after]
        assert 'trioserve_http_requests_total{route="other",status="4xx"} 80.0' in after
        assert all(f'route="/version",status="{s}"' in before for s in STATUS_CLASSES)


async def test_routes_are_all_known_to_the_metrics() -> None:
    from trioserve.config.schema import Config
    from trioserve.http.app import ROUTES, make_app

    app = make_app(FakeEngine(), Config(), trio.Event())
    assert sorted({rule.rule for rule in app.url_map.iter_rules()}) == ROUTES


# ---------------------------------------------------------------------------------- PF-01


async def test_pf_01_large_bodies_do_not_stop_the_others() -> None:
    engine = FakeEngine(max_model_len=10**7)
    async with serving(engine, max_body_bytes=32 * 2**20) as served:
        text = json.dumps(
            {"messages": [{"role": "user", "content": "x" * 100}] * 16000, "pad": "y" * 3_000_000}
        ).encode()
        worst = 0.0
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(served.call, "POST", "/v1/chat/completions", text)
            probe = await served.connect()
            for _ in range(20):
                before = trio.current_time()
                await probe.send("GET", "/health")
                assert (await probe.answer()).status == 200
                worst = max(worst, trio.current_time() - before)
        assert worst < 1.0  # a bound for a busy machine; usually some hundredths
        assert len(engine.streams) == 3


async def test_more_answers_than_can_ever_run_or_wait_are_an_error_of_the_request() -> None:
    """A 429 would be tried again for ever."""
    async with serving() as served:
        most = 64 + 256  # scheduler.max_num_seqs + scheduler.max_waiting
        for body, param in (
            ({"prompt": ["a"] * (most + 1)}, "prompt"),
            ({"prompt": ["a"] * 3, "n": 128}, "prompt"),
        ):
            answer = await served.call("POST", "/v1/completions", body)
            assert answer.status == 400
            assert answer.json["error"]["param"] == param
            assert str(most) in answer.json["error"]["message"]
        assert not served.engine.streams


@pytest.mark.parametrize(
    "filler",
    [
        b"[" + b",".join([b"[]"] * 100_001) + b"]",
        b"[" + b",".join([b"{}"] * 100_001) + b"]",
        b"{" + b",".join(b'"%x":1' % i for i in range(100_001)) + b"}",
        b"[" + b",".join([b"1"] * 2_000_002) + b"]",
    ],
    ids=["arrays", "objects", "keys", "items"],
)
async def test_a_body_of_countless_parts_is_refused_undecoded(filler: bytes) -> None:
    """Decoding one would stop the server for all others, in a thread too."""
    raw = b'{"prompt": "a", "metadata": ' + filler + b"}"
    with pytest.raises(InvalidBody, match="are the most"):
        decode_object(raw)
    async with serving() as served:
        answer = await served.call("POST", "/v1/completions", raw)
        assert answer.status == 400
        assert "are the most" in answer.json["error"]["message"]


def test_a_long_text_is_not_countless_parts() -> None:
    text = "f([a, b], {c: 1});\n" * 20_000
    assert decode_object(json.dumps({"prompt": text}).encode())["prompt"] == text
