"""What the worker was asked and has not answered yet."""

from __future__ import annotations

import trio

from trioserve.ipc.messages import Check, Checked, Control, Controlled


class Questions:
    """Only the Engine asks; only the supervisor's tasks answer. One trio thread."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}

    async def ask(self, command: Check | Control) -> Checked | Controlled | None:
        """Wait for the answer to a command on its way; None if the worker ends first.

        Cancelled: the answer is still taken in.
        """
        question = self._open[command.token] = _Question(command)
        await question.came.wait()
        return question.answer

    def answer(self, event: Checked | Controlled) -> Check | Control | None:
        """An answer has come: what it is to, or None where nothing was asked."""
        question = self._open.pop(event.token, None)
        if question is None:
            return None
        question.answer = event
        question.came.set()
        return question.command

    def end_worker(self) -> None:
        """There will be no more answers."""
        questions, self._open = self._open, {}
        for question in questions.values():
            question.came.set()


class _Question:
    """``answer`` stays None if the worker ends first."""

    def __init__(self, command: Check | Control) -> None:
        self.command = command
        self.came = trio.Event()
        self.answer: Checked | Controlled | None = None
