"""The parent's ends of the pipes of frames: as trio's own stream, but for the turns of the loop."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import termios
from collections.abc import Iterator

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trioserve.ipc.framing import MalformedFrame
from trioserve.ipc.messages import Work
from trioserve.ipc.pipes import ReadPipe, WritePipe
from trioserve.ipc.streams import FrameReader, FrameWriter
from trioserve.sampling_params import SamplingParams

FULL = 1 << 20  # more than any pipe holds


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    fds = os.pipe()
    yield fds
    for fd in fds:
        with contextlib.suppress(OSError):  # closed by the test
            os.close(fd)


def close(pipe: ReadPipe | WritePipe) -> None:
    pipe._pipe.close()


async def write_to_closed(writer: WritePipe) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await writer.send_all(bytes(FULL))


async def test_bytes_come_as_they_are_and_then_the_end(ends: tuple[int, int]) -> None:
    reader, writer = ReadPipe(ends[0]), WritePipe(ends[1])
    await writer.send_all(b"one")
    await writer.send_all(memoryview(b"two"))
    with assert_checkpoints():
        assert await reader.receive_some(4) == b"onet"
    assert await reader.receive_some() == b"wo"
    close(writer)
    assert await reader.receive_some(10) == b""
    assert await reader.receive_some(10) == b""
    await reader.aclose()
    assert reader.fileno() == -1


async def test_a_send_that_finds_room_does_not_wait(ends: tuple[int, int]) -> None:
    writer = WritePipe(ends[1])
    ran = trio.Event()

    async def other() -> None:
        ran.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await writer.send_all(b"x")
        await writer.send_all(b"")
        assert not ran.is_set()
    await writer.aclose()


async def test_a_full_pipe_makes_the_sender_wait_and_loses_nothing(ends: tuple[int, int]) -> None:
    reader, writer = ReadPipe(ends[0]), WritePipe(ends[1])
    sent, came = os.urandom(FULL), bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.send_all, sent)
        while len(came) < len(sent):
            came += await reader.receive_some(10_000)
    assert bytes(came) == sent
    await writer.aclose()
    await reader.aclose()


async def test_cancelled_before_it_begins_it_does_nothing(ends: tuple[int, int]) -> None:
    reader, writer = ReadPipe(ends[0]), WritePipe(ends[1])
    with trio.CancelScope() as scope:
        scope.cancel()
        await writer.send_all(b"never")
    assert scope.cancelled_caught
    await writer.send_all(b"sent")
    with trio.CancelScope() as scope:
        scope.cancel()
        await reader.receive_some(10)
    assert scope.cancelled_caught
    assert await reader.receive_some(10) == b"sent"
    await writer.aclose()
    await reader.aclose()


async def test_cancelled_while_it_waits(ends: tuple[int, int]) -> None:
    reader, writer = ReadPipe(ends[0]), WritePipe(ends[1])
    for wait in (lambda: reader.receive_some(10), lambda: writer.send_all(bytes(FULL))):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    await writer.aclose()
    await reader.aclose()


async def test_closed_it_says_so_before_and_meanwhile(ends: tuple[int, int]) -> None:
    reader, writer = ReadPipe(ends[0]), WritePipe(ends[1])

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await reader.receive_some(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        close(reader)
    await read()
    await writer.aclose()
    await write_to_closed(writer)


async def test_closed_while_it_is_full_it_says_so(ends: tuple[int, int]) -> None:
    writer = WritePipe(ends[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_to_closed, writer)
        await wait_all_tasks_blocked()
        close(writer)


async def test_without_a_reader_the_pipe_is_broken(ends: tuple[int, int]) -> None:
    writer = WritePipe(ends[1])
    os.close(ends[0])
    with pytest.raises(trio.BrokenResourceError):
        await writer.send_all(b"x")
    await writer.aclose()


# --------------------------------------------------------------------- a frame without a turn


def work(num_tokens: int = 3, id: int = 1) -> Work:
    return Work(id, [7] * num_tokens, SamplingParams(), 0, 0, "")


async def test_a_small_message_goes_out_at_once_or_not_at_all(ends: tuple[int, int]) -> None:
    reader: FrameReader[Work] = FrameReader(ReadPipe(ends[0]), Work)
    pipe = WritePipe(ends[1])
    writer = FrameWriter(pipe)
    assert writer.try_send(work())
    assert await reader.__anext__() == work()
    assert not writer.try_send(work(num_tokens=5000))  # the kernel might take a part of it
    while pipe.try_write(bytes(select.PIPE_BUF)):
        pass
    assert not writer.try_send(work())  # there is no room
    while os.read(ends[0], FULL) and num_unread(ends[0]):
        pass
    assert writer.try_send(work(id=2))
    assert (await reader.__anext__()).id == 2
    await writer.aclose()
    assert not writer.try_send(work())
    await reader.aclose()


async def test_nothing_goes_between_the_parts_of_a_message(ends: tuple[int, int]) -> None:
    reader: FrameReader[Work] = FrameReader(ReadPipe(ends[0]), Work)
    writer = FrameWriter(WritePipe(ends[1]))
    long = work(num_tokens=FULL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.send, long)
        await wait_all_tasks_blocked()
        assert num_unread(ends[0])  # a part of it
        assert not writer.try_send(work())
        assert await reader.__anext__() == long
    assert writer.try_send(work())
    assert await reader.__anext__() == work()
    await writer.aclose()
    await reader.aclose()


async def test_what_cannot_be_a_frame_is_left_to_send(ends: tuple[int, int]) -> None:
    writer = FrameWriter(WritePipe(ends[1]))
    wrong = Work(1 << 70, [1], SamplingParams(), 0, 0, "")
    assert not writer.try_send(wrong)
    with pytest.raises(MalformedFrame):
        await writer.send(wrong)
    await writer.aclose()


def num_unread(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
