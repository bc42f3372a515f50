"""Streams that are read as fast as they come, by a process that does nothing else.

    python bench/lib/flood.py PORT NUM_STREAMS MAX_TOKENS

Opens the streams, one again as each ends, until its stdin ends; then prints how many events and
bytes came. Plain sockets and one poll: it must cost less than the server it measures.
"""

from __future__ import annotations

import json
import select
import socket
import sys

BUFFER_BYTES = 1 << 18


def main(port: int, num_streams: int, max_tokens: int) -> dict[str, int]:
    body = json.dumps(
        {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    poll = select.epoll()
    poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    streams = {}
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(request)
        streams[stream.fileno()] = stream
        poll.register(stream.fileno(), select.EPOLLIN)
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    num_events = num_bytes = num_refused = 0
    while True:
        for descriptor, _ in poll.poll():
            if descriptor not in streams:
                return {"events": num_events, "bytes": num_bytes, "refused": num_refused}
            size = streams[descriptor].recv_into(view)
            if not size:
                raise SystemExit("a stream was closed")
            num_bytes += size
            num_events += buffer.count(b"data: ", 0, size)
            num_refused += buffer.count(b"HTTP/1.1 4", 0, size)
            if buffer.endswith(b"0\r\n\r\n", max(0, size - 5), size):
                streams[descriptor].sendall(request)


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
