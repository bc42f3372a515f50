"""Looks at a server again and again, until told to stop."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import trio

from trioserve.top.client import Address, Unreachable, fetch
from trioserve.top.reading import History, make_reading, read
from trioserve.top.view import View, make_view, snapshot

UNREACHABLE = 1  # exit code of --once


def run_top(address: Address, *, interval_s: float, once: bool) -> int:
    """Show the server at ``address``; returns the exit code.

    Ctrl-C is how one leaves: 0. SIGTERM gives 143. With ``once`` nobody's answer gives 1, and
    Ctrl-C 130. A reader of stdout that has left ends it with 0.
    """
    exit_code = 0
    try:
        main = partial(look_once, address) if once else partial(look_on, address, interval_s)
        exit_code = trio.run(main)
    except* KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT if once else 0
    except* BrokenPipeError:
        # Python would try to flush what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


async def look_once(address: Address) -> int:
    """Print one snapshot. Cancellation prints nothing."""
    history = History()
    try:
        await look(address, history)
    except Unreachable as error:
        print(f"trioserve: no answer from {address}: {error}", file=sys.stderr)
        return UNREACHABLE
    print(snapshot(make_reading(history)))
    return 0


async def look_on(address: Address, interval_s: float) -> int:
    """Show the server until a signal comes; returns the exit code.

    Cancellation leaves the terminal in order.
    """
    number: int = signal.SIGINT
    async with trio.open_nursery() as nursery:
        nursery.start_soon(show_on, address, interval_s, make_view())
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            number = await anext(signals)
            nursery.cancel_scope.cancel()
    return 0 if number == signal.SIGINT else 128 + number


async def show_on(address: Address, interval_s: float, view: View) -> None:
    """Look every ``interval_s`` seconds and show it; a server that is gone is asked on."""
    history = History()
    try:
        while True:
            try:
                await look(address, history)
            except Unreachable as error:
                reading = make_reading(history) if history.now else None
                view.gone(str(address), str(error), reading)
            else:
                view.show(make_reading(history))
            await trio.sleep(interval_s)
    finally:
        view.close()


async def look(address: Address, history: History) -> None:
    """Add one snapshot. Raises Unreachable, and adds none."""
    startup = await fetch(address, "/startup")
    metrics = await fetch(address, "/metrics")
    history.add(read(startup, metrics, trio.current_time()))
