"""The home of tasks that outlive their connection."""

from __future__ import annotations

import pytest
import trio

from trioserve.errors import NotReady, QueueFull
from trioserve.http.background import BackgroundTasks


async def sleeper(name: str, task_status: trio.TaskStatus[str]) -> None:
    task_status.started(name)
    await trio.sleep_forever()


async def test_tasks_end_with_their_home() -> None:
    tasks = BackgroundTasks()
    async with trio.open_nursery() as nursery:
        await nursery.start(tasks.run)
        assert await tasks.start(sleeper, "a") == "a"
        nursery.cancel_scope.cancel()
    with pytest.raises(NotReady):
        await tasks.start(sleeper, "b")


async def test_without_a_home_none_is_started() -> None:
    with pytest.raises(NotReady):
        await BackgroundTasks().start(sleeper, "a")


async def test_what_fails_before_it_has_started_is_the_starters_fault() -> None:
    async def refused(task_status: trio.TaskStatus[None]) -> None:
        raise QueueFull("full")

    tasks = BackgroundTasks()
    async with trio.open_nursery() as nursery:
        await nursery.start(tasks.run)
        with pytest.raises(QueueFull):
            await tasks.start(refused)
        assert await tasks.start(sleeper, "a") == "a"  # the others go on
        nursery.cancel_scope.cancel()
