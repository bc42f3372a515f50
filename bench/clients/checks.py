"""What the clients' modules share: the server they ask, and the table of what was checked."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
from attrs import field, frozen

TIMEOUT_S = 60.0
TO_BE_STOPPED = {"max_tokens": 2000, "min_tokens": 2000, "ignore_eos": True}
"""Fields of a request that goes on until somebody ends it."""


@frozen
class Target:
    """The server that is asked.

    Attributes:
        url: without ``/v1``.
        model: what it serves, as clients name it.
        key: one of its API keys.
        room: requests that run or wait before it says 429; None where that is not known.
        samples: whether tokens come from a model; the simulated device makes them up.
    """

    url: str
    model: str
    key: str
    room: int | None = None
    samples: bool = True

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def metric(self, name: str) -> float:
        """The value of a series without labels."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=TIMEOUT_S).text
        [value] = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(value)

    def wait_for_open(self, number: int) -> None:
        """Wait until so many requests are open.

        Raises:
            AssertionError: they are not, for ten seconds.
        """
        deadline = time.monotonic() + 10
        while (seen := self.metric("trioserve_requests_open")) != number:
            assert time.monotonic() < deadline, f"{seen:g} requests are open, not {number}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """While the block runs, the next request is a 429."""
        assert self.room is not None
        body = json.dumps({"model": self.model, "prompt": "a", "stream": True} | TO_BE_STOPPED)
        headers = self.headers | {"Content-Type": "application/json"}
        host = urlsplit(self.url)
        assert host.scheme == "http"
        with contextlib.ExitStack() as stack:
            for _ in range(self.room):
                connection = http.client.HTTPConnection(host.netloc, timeout=TIMEOUT_S)
                stack.callback(connection.close)
                connection.request("POST", "/v1/completions", body, headers)
            self.wait_for_open(self.room)
            yield
        self.wait_for_open(0)


@frozen
class Table:
    """One line for each check, printed as it ends."""

    client: str
    failed: list[str] = field(factory=list)
    left_out: list[str] = field(factory=list)

    @contextlib.contextmanager
    def check(self, what: str) -> Iterator[None]:
        """The block is the check; what it raises is its failure, and the next one goes on."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failed.append(what)
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            self._line("FAILED", what, lines[0] + (" ..." if lines[1:] else ""))
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                if "bench/clients" in where.tb_next.tb_frame.f_code.co_filename:
                    print(f"          line {where.tb_next.tb_lineno}")
                where = where.tb_next
        else:
            self._line("ok", what, f"{time.monotonic() - start:.2f} s")

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.append(what)
        self._line("left out", what, why)

    def _line(self, state: str, what: str, more: str) -> None:
        print(f"{self.client:18}  {state:8}  {what:52}  {more}", flush=True)


@contextlib.contextmanager
def raises(kind: type[Exception], **attributes: Any) -> Iterator[list[Any]]:
    """The block must raise ``kind`` with these attributes; the error is put into the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    for name, wanted in attributes.items():
        seen = getattr(caught[0], name)
        assert seen == wanted, f"{name} of the {kind.__name__} is {seen!r}, not {wanted!r}"


def equal(seen: object, wanted: object) -> None:
    """Raises:
    AssertionError: they differ; it has both.
    """
    assert seen == wanted, f"{seen!r} is not {wanted!r}"
