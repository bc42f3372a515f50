"""A home for work that outlives the connection that asked for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trioserve.errors import NotReady


class BackgroundTasks:
    """The nursery of one server for tasks that no connection waits for; the server runs it.

    A task must not raise: it would end the server. Those that answer a request open it with
    ``OpenRequests.opened``, so that a drain waits for them and ends them at its deadline.
    """

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let tasks run until cancelled, which cancels them."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def start(self, task: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Start ``task(*args, task_status=...)`` and return what it gives to ``started``.

        Cancellation before that ends the task.

        Raises:
            NotReady: the server is ending.
            Exception: what the task raised before it had started.
        """
        if self._nursery is None:
            raise NotReady("the server is shutting down; send the request to another")
        return await self._nursery.start(task, *args)
