"""Bodies are decoded strictly, whichever of the ways is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.http.errors import InvalidBody
from trioserve.http.fields import MAX_DEPTH, SMALL_BODY_BYTES, decode_object, shown, takes_long

texts = st.text(st.sampled_from('ab":\\ {}[],é\n'), max_size=6)
spaces = st.sampled_from(["", " ", "\n", "\t", "\r\n "])
PAD = "x" * SMALL_BODY_BYTES


@st.composite
def written(draw: st.DrawFn, depth: int = 0) -> str:
    """JSON as someone else writes it, perhaps with a key given twice."""

    def space() -> str:
        return draw(spaces)

    kind = draw(st.integers(0, 5)) if depth < 3 else 0
    if kind == 0:
        return json.dumps(draw(st.one_of(texts, st.integers(), st.none(), st.booleans())))
    if kind == 1:
        items = [draw(written(depth + 1)) for _ in range(draw(st.integers(0, 3)))]
        return "[" + f"{space()},{space()}".join(items) + space() + "]"
    pairs = []
    for _ in range(draw(st.integers(0, 3))):
        key = json.dumps(draw(texts), ensure_ascii=draw(st.booleans()))
        pairs.append(f"{space()}{key}{space()}:{space()}{draw(written(depth + 1))}{space()}")
    return "{" + ",".join(pairs) + "}"


class Twice(Exception):
    pass


def reference(raw: bytes) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise Twice
        return dict(items)

    return json.loads(raw, object_pairs_hook=pairs)


@settings(max_examples=300)
@given(inner=written(), long=st.booleans())
def test_decoding_agrees_with_the_definition(inner: str, long: bool) -> None:
    raw = f'{{"a": {inner}, "pad": "{PAD if long else ""}"}}'.encode()
    try:
        want = reference(raw)
    except Twice:
        with pytest.raises(InvalidBody, match="given twice"):
            decode_object(raw)
    else:
        assert decode_object(raw) == want


@pytest.mark.parametrize("between", ['":', '" :', '"\n:', '"\t\r\n :'])
def test_a_key_given_twice_is_found_in_a_long_body(between: str) -> None:
    for twice in (
        f'"a{between} 1, "a{between} 2',
        f'"b": [{{"a{between} 1, "a{between} 2}}]',
        f'"b": {{"a\\\\{between} 1, "a\\\\{between} 2}}',
        f'"b": {{"a{between} 1, "\\u0061{between} 2}}',
    ):
        body = f'{{"pad": "{PAD}", {twice}}}'
        with pytest.raises(InvalidBody, match="given twice"):
            decode_object(body.encode())


@pytest.mark.parametrize("pad", ["", PAD])
def test_depth(pad: str) -> None:
    for depth, is_fine in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False), (1000, False)):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            inner = opening * depth + ("1" if "{" in opening else "") + closing * depth
            raw = f'{{"pad": "{pad}", "a": {inner}}}'.encode()
            if is_fine:
                decode_object(raw)
            else:
                with pytest.raises(InvalidBody, match="nested"):
                    decode_object(raw)


def test_what_looks_like_parts_inside_a_text_is_text() -> None:
    code = 'f([a, b], {"c": 1});\n' * 40_000
    raw = json.dumps({"prompt": code}).encode()
    assert decode_object(raw)["prompt"] == code
    assert takes_long(raw)


def test_short_bodies_of_many_parts_go_to_the_thread() -> None:
    assert takes_long(b'{"a":[' + b"[]," * 5000 + b"1]}")
    assert takes_long(b'{"a":[' + b"1," * 5000 + b"1]}")
    assert takes_long(json.dumps({"a": "x" * 300_000}).encode())
    assert not takes_long(json.dumps({"a": "x" * 200_000}).encode())
    assert not takes_long(b'{"prompt": "a"}')


def test_values_in_messages_are_short_and_cheap() -> None:
    assert shown("x" * 10**7) == shown("x" * 10**7)[:60]
    assert len(shown([["x" * 100] * 100] * 10**5)) <= 60
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert len(shown(deep)) <= 60
    assert shown("it's") == '"it\'s"'
