"""Between the parent and its worker: messages, frames, the process and its status page."""

from __future__ import annotations

FDS_FLAG = "--fds"  # before the numbers of the descriptors that a worker gets
