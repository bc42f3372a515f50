"""A log that nobody reads holds up nothing."""

from __future__ import annotations

import logging
import os
import select
import time

from trioserve.logs import PatientHandler, TextFormatter


def make_logger(fd: int) -> logging.Logger:
    handler = PatientHandler(fd)
    handler.setFormatter(TextFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def read_all(fd: int) -> str:
    os.set_blocking(fd, False)
    data = b""
    try:
        while piece := os.read(fd, 65536):
            data += piece
    except BlockingIOError:
        pass
    return data.decode()


def test_lines_are_lost_and_counted_while_nobody_reads() -> None:
    read, write = os.pipe()
    logger = make_logger(write)
    began_s = time.monotonic()
    for index in range(3000):
        logger.info("line %d %s", index, "x" * 80)
    assert time.monotonic() - began_s < 5  # one pause for patience, none after it
    shown = read_all(read)
    num_shown = shown.count("INFO")
    assert 0 < num_shown < 3000
    logger.info("read again")
    warning, line = read_all(read).splitlines()[-2:]
    assert f"{3000 - num_shown} log lines are lost" in warning
    assert line.endswith("read again")
    logger.info("once")
    assert "lost" not in read_all(read)
    os.close(read)
    os.close(write)


def test_a_text_longer_than_the_pipe_takes_at_once_arrives_whole() -> None:
    read, write = os.pipe()
    logger = make_logger(write)
    text = "y" * (3 * select.PIPE_BUF + 17)
    logger.info("%s", text)
    assert text in read_all(read)
    os.close(read)
    os.close(write)


def test_a_log_without_a_reader_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    logger = make_logger(write)
    logger.info("nobody hears")
    os.close(write)
