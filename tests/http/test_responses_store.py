"""The store of responses against a naive model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.http.responses.store import Kept, ResponseNotFound, ResponseStore, Turn


def item(text: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "input_text", "text": text}]}


def kept(name: str, parent: Turn | None = None, text: str = "x", size: int = 10) -> Kept:
    turn = Turn.of(parent, [item(text)]).answered([item(f"answer to {text}")])
    return Kept(name, b"r" * size, "completed", False, turn)


def texts(turn: Turn) -> list[str]:
    return [one["content"][0]["text"] for one in turn.items()]


def test_a_conversation_is_all_turns_in_order() -> None:
    first = kept("a", text="one")
    second = kept("b", first.turn, "two")
    assert texts(second.turn) == ["one", "answer to one", "two", "answer to two"]
    given_items = [one["content"][0]["text"] for one in second.turn.given()]
    assert given_items == ["one", "answer to one", "two"]


def test_a_turn_without_an_answer_stays_as_it_is() -> None:
    turn = Turn.of(None, [item("one")])
    assert texts(turn.answered([])) == ["one"]
    assert turn.conversation_bytes == turn.num_bytes
    assert Turn.of(turn, [item("two")]).conversation_bytes > turn.num_bytes


def test_the_oldest_makes_room_and_its_conversation_stays() -> None:
    store = ResponseStore(2, 10**6)
    first = kept("a", text="one")
    second = kept("b", first.turn, "two")
    for response in (first, second, kept("c")):
        assert store.put(response)
        store.check_integrity()
    with pytest.raises(ResponseNotFound) as caught:
        store.get("a")
    assert caught.value.status == 404
    assert texts(store.get("b").turn)[0] == "one"
    store.discard("b")
    store.discard("b")
    store.check_integrity()
    store.discard("c")
    assert store.num_bytes == 0
    assert len(store) == 0


def test_bytes_are_bound_too() -> None:
    store = ResponseStore(1000, 10_000)
    for index in range(100):
        store.put(kept(str(index), size=500))
        store.check_integrity()
    assert 1 < len(store) < 20
    before = len(store), store.num_bytes
    assert not store.put(kept("large", size=20_000))
    assert (len(store), store.num_bytes) == before
    assert store.put(kept("small"))


def test_a_store_of_none_keeps_none() -> None:
    store = ResponseStore(0, 10**6)
    assert not store.enabled
    assert not store.put(kept("a"))
    assert store.num_bytes == 0


actions = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "discard"]),
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(0, 9)),
        st.integers(0, 3000),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(actions, st.integers(0, 6), st.integers(0, 20_000))
def test_agrees_with_a_naive_store(
    steps: list[tuple[str, int, int | None, int]], most: int, most_bytes: int
) -> None:
    store = ResponseStore(most, most_bytes)
    model: dict[str, Kept] = {}
    made: list[Kept] = []
    for action, number, parent, size in steps:
        name = str(number)
        if action == "discard":
            store.discard(name)
            model.pop(name, None)
        else:
            # Also on turns whose response is long gone: a request may hold one meanwhile.
            before = made[parent].turn if parent is not None and parent < len(made) else None
            response = kept(name, before, str(len(made)), size)
            made.append(response)
            model.pop(name, None)
            if _bytes({name: response}) <= most_bytes:
                model[name] = response
            while len(model) > most or _bytes(model) > most_bytes:
                del model[next(iter(model))]
            assert store.put(response) == (name in model)
        store.check_integrity()
        assert len(store) == len(model)
        assert store.num_bytes == _bytes(model)
        for key, response in model.items():
            assert store.get(key) is response


def _bytes(model: dict[str, Kept]) -> int:
    turns: dict[int, Turn] = {}
    for response in model.values():
        turn: Turn | None = response.turn
        while turn is not None:
            turns[id(turn)] = turn
            turn = turn.parent
    return sum(r.num_bytes for r in model.values()) + sum(t.num_bytes for t in turns.values())
