"""Frames in any split, in any state of disrepair; both stream ends over memory streams."""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trioserve.errors import WorkerDied
from trioserve.ipc.framing import (
    FEW_BYTES,
    READ_BYTES,
    FrameDecoder,
    FrameError,
    MalformedFrame,
    TruncatedFrame,
    decode,
    encode,
    next_read,
    write_frame,
)
from trioserve.ipc.messages import (
    Abort,
    Check,
    Command,
    Delta,
    Event,
    Exit,
    Hello,
    Init,
    Load,
    ReadyInfo,
    Stage,
    StepOutput,
    StepStats,
    TokenLogprobs,
    Work,
)
from trioserve.ipc.streams import FrameReader, FrameWriter
from trioserve.sampling_params import SamplingParams

STATS = StepStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5)
COMMANDS = [
    Init({"model": {"source": "x"}}),
    Load({"layers": [1, 2.5, None, b"\x00"]}),
    Work(7, [1, 2, 3], SamplingParams(stop=("a",), seed=3), seed=2**63 - 1, cache_salt="s"),
    Abort([1, 2]),
    Check(9),
    Exit(),
]
EVENTS = [
    Hello(1, "0.1.0", 12),
    StepOutput(
        3,
        [Delta(7, [5], "stop", 5, [TokenLogprobs(5, -0.5, 1, [(5, -0.5), (6, -1.0)])], 16)],
        STATS,
    ),
]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 5000), max_size=12))
def test_payloads_come_out_as_they_went_in_however_they_are_cut(
    payloads: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(len(p).to_bytes(4, "little") + p for p in payloads)
    decoder = FrameDecoder()
    assert [out for part in split(stream, cuts) for out in decoder.feed(part)] == payloads
    decoder.finish()


@given(st.binary(min_size=1, max_size=100), st.data())
def test_an_end_inside_a_frame_is_an_error_wherever_it_comes(
    payload: bytes, data: st.DataObject
) -> None:
    frame = len(payload).to_bytes(4, "little") + payload
    decoder = FrameDecoder()
    assert decoder.feed(frame[: data.draw(st.integers(1, len(frame) - 1))]) == []
    with pytest.raises(TruncatedFrame, match="bytes into a frame"):
        decoder.finish()


def test_a_length_over_the_limit_is_an_error_before_any_payload() -> None:
    decoder = FrameDecoder(max_frame_bytes=100)
    with pytest.raises(MalformedFrame, match=r"claims 101 bytes, over the limit of 100"):
        decoder.feed((101).to_bytes(4, "little"))
    with pytest.raises(MalformedFrame):
        decoder.feed(b"more")


def test_good_frames_ahead_of_a_bad_length_are_not_lost() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encode(Check(1)) + b"\xff\xff\xff\xff") == [encode(Check(1))[4:]]
    with pytest.raises(MalformedFrame):
        decoder.feed(b"")


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: type(m).__name__)
def test_each_command_survives_the_wire(message: Command) -> None:
    (payload,) = FrameDecoder().feed(encode(message))
    assert decode(msgspec.msgpack.Decoder(Command), payload) == message


@pytest.mark.parametrize("message", EVENTS, ids=lambda m: type(m).__name__)
def test_each_event_survives_the_wire(message: Event) -> None:
    (payload,) = FrameDecoder().feed(encode(message))
    assert decode(msgspec.msgpack.Decoder(Event), payload) == message


@pytest.mark.parametrize(
    "payload",
    [b"", b"abcd", b"\xc1", msgspec.msgpack.encode(["hello", "one", 2, 3]), encode(Check(1))[4:]],
)
def test_a_payload_that_is_no_event_is_named(payload: bytes) -> None:
    with pytest.raises(MalformedFrame, match=f"a frame of {len(payload)} bytes.*no message"):
        decode(msgspec.msgpack.Decoder(Event), payload)


def test_a_message_over_the_limit_is_refused_by_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trioserve.ipc.framing.MAX_FRAME_BYTES", 100)
    with pytest.raises(MalformedFrame, match="a Abort of"):
        encode(Abort(list(range(1000))))


def test_a_frame_error_ends_the_incarnation_like_a_death() -> None:
    assert issubclass(FrameError, WorkerDied)


def test_write_frame_goes_on_where_the_pipe_takes_a_part_only() -> None:
    read, write = os.pipe()
    frame = os.urandom(1_000_000)  # a pipe holds 64 KiB
    received = bytearray()

    def drain() -> None:
        while data := os.read(read, 10_000):
            received.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    write_frame(write, frame)
    os.close(write)
    reader.join(10)
    os.close(read)
    assert bytes(received) == frame


def test_write_frame_says_that_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        write_frame(write, b"x")
    os.close(write)


# --------------------------------------------------------------------------------- streams


async def reader_of(data: bytes, *, ended: bool = True) -> FrameReader[Event]:
    send, receive = trio.testing.memory_stream_one_way_pair()
    await send.send_all(data)
    if ended:
        await send.aclose()
    return FrameReader(receive, Event)


async def test_reader_ends_between_two_frames() -> None:
    reader = await reader_of(b"".join(map(encode, EVENTS)))
    assert [event async for event in reader] == EVENTS
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


async def test_reader_names_an_end_inside_a_frame_after_the_whole_ones() -> None:
    reader = await reader_of(encode(EVENTS[0]) + encode(EVENTS[1])[:-1])
    assert await anext(reader) == EVENTS[0]
    for _ in range(2):
        with pytest.raises(TruncatedFrame):
            await anext(reader)


@pytest.mark.parametrize("bad", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", encode(Exit())])
async def test_reader_raises_at_garbage_at_once_and_ever_after(bad: bytes) -> None:
    reader = await reader_of(encode(EVENTS[0]) + bad, ended=False)
    assert await anext(reader) == EVENTS[0]
    for _ in range(2):
        with pytest.raises(MalformedFrame):
            await anext(reader)


async def test_reader_loses_nothing_when_cancelled() -> None:
    send, receive = trio.testing.memory_stream_one_way_pair()
    reader: FrameReader[Event] = FrameReader(receive, Event)
    stream = b"".join(map(encode, EVENTS)) * 3
    seen: list[Any] = []
    for position in range(len(stream)):
        await send.send_all(stream[position : position + 1])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def read_one() -> None:
                    seen.append(await anext(reader))

                nursery.start_soon(read_one)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
    assert seen == EVENTS * 3


async def test_reader_takes_no_message_when_already_cancelled() -> None:
    reader = await reader_of(encode(EVENTS[0]))
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(reader)
    assert scope.cancelled_caught
    assert await anext(reader) == EVENTS[0]


async def test_writer_accepts_nothing_after_a_cut_frame() -> None:
    send, receive = trio.testing.lockstep_stream_one_way_pair()
    writer = FrameWriter(send)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.send, Check(1))
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    with pytest.raises(FrameError, match="cut off"):
        await writer.send(Check(2))
    await receive.aclose()


async def test_writer_and_reader_meet_and_the_writer_says_when_nobody_reads() -> None:
    send, receive = trio.testing.lockstep_stream_one_way_pair()
    writer = FrameWriter(send)
    reader: FrameReader[Command] = FrameReader(receive, Command)
    async with trio.open_nursery() as nursery:

        async def send_all() -> None:
            for command in COMMANDS:
                await writer.send(command)

        nursery.start_soon(send_all)
        assert [await anext(reader) for _ in COMMANDS] == COMMANDS
    await reader.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await writer.send(Check(1))


async def test_discard_reads_to_the_end_and_gives_way_to_another_reader() -> None:
    await (await reader_of(encode(EVENTS[0]) + b"\xff\xff\xff\xff")).discard()
    reader = await reader_of(b"", ended=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.discard)
        await trio.testing.wait_all_tasks_blocked()
        await reader.discard()
        nursery.cancel_scope.cancel()


def test_docs_messages_names_every_message_and_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
    structs = [
        *(part for union in (Command, Event) for part in get_args(union)),
        *(ReadyInfo, Delta, TokenLogprobs, StepStats),
    ]
    for struct in structs:
        fields = [field.encode_name for field in msgspec.structs.fields(struct)]
        tag = struct.__struct_config__.tag
        # One row each: its tag where it has one, its name, its fields in order and no others.
        start = f"| `{tag}` | {struct.__name__}" if tag else f"| {struct.__name__}"
        (row,) = [line for line in text.splitlines() if re.match(re.escape(start) + r"\b", line)]
        assert re.findall(r"`(\w+)`", row.split("|")[3 if tag else 2]) == fields


def test_kv_06_small_messages_are_read_into_small_buffers_and_large_ones_are_not() -> None:
    """A buffer cut from 64 KiB to a message leaves a hole in the heap."""
    assert next_read(FEW_BYTES, 300) == FEW_BYTES
    assert next_read(FEW_BYTES, FEW_BYTES) == READ_BYTES
    assert next_read(READ_BYTES, READ_BYTES) == READ_BYTES
    assert next_read(READ_BYTES, 100) == FEW_BYTES


async def test_kv_06_a_reader_asks_for_more_only_while_there_is_more() -> None:
    send, receive = trio.testing.memory_stream_one_way_pair()
    asked: list[int] = []
    receive_some = receive.receive_some

    async def recording(max_bytes: int | None = None) -> bytes:
        asked.append(max_bytes or 0)
        return bytes(await receive_some(max_bytes))

    receive.receive_some = recording  # type: ignore[method-assign]
    reader: FrameReader[Any] = FrameReader(receive, Stage)
    for detail in ("small", "x" * 200_000, "small", "small"):
        await send.send_all(encode(Stage("python", "start", detail=detail)))
        assert (await anext(reader)).detail == detail
    assert asked[0] == FEW_BYTES
    assert max(asked) == READ_BYTES
    assert asked[-1] == FEW_BYTES
    assert len(asked) < 15
