"""A worker for tests: no model, and one fault, named by the environment variable FAULT."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

from trioserve import __version__
from trioserve.ipc.child import Channel
from trioserve.ipc.framing import encode, write_frame
from trioserve.ipc.messages import PROTOCOL, Check, Checked, Exit, Hello, Stage, StepStats

NO_STATS = StepStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
FAULT = os.environ.get("FAULT", "")
HELLO = Hello(PROTOCOL, __version__, os.getpid())


def sleep_for_ever():
    while True:
        time.sleep(1000)


def hold_gil():
    # A read of a pipe, unlike a sleep, goes on after a signal.
    read, _ = os.pipe()
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)


def hold_gil_in_regex():
    re.match(r"(a|aa)+$", "a" * 200 + "b")


def serve(channel):
    """Answer each Check until told to leave."""
    while not isinstance(command := channel.inbox.get(), Exit):
        if isinstance(command, Check):
            channel.send(Checked(command.token, NO_STATS, 0, ""))


def before_hello(channel, events):
    if FAULT == "exit 3":
        print("cannot import what is not there", file=sys.stderr)
        sys.exit(3)
    elif FAULT == "kill self":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "silent":
        print("thinking", file=sys.stderr)
        sleep_for_ever()
    elif FAULT == "silent, GIL held":
        hold_gil()
    elif FAULT == "other protocol":
        channel.send(Hello(PROTOCOL + 1, __version__, os.getpid()))
    elif FAULT == "other version":
        channel.send(Hello(PROTOCOL, "0.0.1", os.getpid()))
    elif FAULT == "10 MB line":
        os.write(2, b"start\n")
        for _ in range(160):
            os.write(2, b"x" * 65536)
        os.write(2, b"\nend\n")
    elif FAULT == "10 MB lines":
        for _ in range(160):
            os.write(2, (b"y" * 127 + b"\n") * 512)
    elif FAULT == "prints":
        print("printed")
        os.write(1, b"written to 1\n")
        subprocess.run(["echo", "from a program"], check=True)
    elif FAULT == "stage first":
        channel.send(Stage("python", "start"))
    elif FAULT == "half a frame":
        write_frame(events, encode(HELLO)[:-2])
        sys.exit(0)
    elif FAULT == "oversized frame":
        write_frame(events, b"\xff\xff\xff\xff" + b"x" * 100)
    elif FAULT == "no message":
        write_frame(events, b"\x04\x00\x00\x00abcd")
    elif FAULT == "fork holds pipes":
        if os.fork() == 0:
            sleep_for_ever()
        sys.exit(3)
    elif FAULT == "escaped child holds stderr":
        escaped = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("escaped", escaped.pid, file=sys.stderr)
        sys.exit(3)


def after_hello(channel):
    if FAULT == "grandchild":
        grandchild = subprocess.Popen(["sleep", "1000"])
        channel.send(Stage("python", "progress", detail=str(grandchild.pid)))
    elif FAULT == "open files":
        held = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False
        )
        channel.send(Stage("python", "progress", detail=held.stdout))
    elif FAULT == "modules":
        channel.send(Stage("python", "progress", detail=" ".join(sys.modules)))
    elif FAULT == "GIL held":
        channel.status.begin("a native call", 1000.0)
        channel.send(Stage("python", "progress"))
        hold_gil()
    elif FAULT == "GIL held in a regex":
        channel.send(Stage("python", "progress"))
        hold_gil_in_regex()
    elif FAULT == "deaf":
        print("deaf", file=sys.stderr)
        sleep_for_ever()
    elif FAULT == "exit 5":
        print("last words", file=sys.stderr)
        sys.exit(5)
    elif FAULT == "kill self later":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "event flood":
        while not channel.inbox.drain():
            channel.send(Stage("weights", "progress", detail="x" * 10000))
        print("saw the end", file=sys.stderr)
        sys.exit(0)


def main():
    channel = Channel.open(sys.argv[1:])
    before_hello(channel, int(sys.argv[2].split(",")[1]))
    channel.send(HELLO)
    after_hello(channel)
    serve(channel)


if __name__ == "__main__":
    main()
