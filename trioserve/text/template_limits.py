"""What one rendering of a chat template may take."""

from __future__ import annotations

import attrs


class Stopped(Exception):
    """The template went beyond a limit; the message says which."""


@attrs.frozen
class Limits:
    """The bounds.

    Attributes:
        steps: rounds of loops, branches, calls, filters; characters made count too.
        size: characters of any text, that of a list or number included; also of the output.
        cpu_s: processor time of its thread.
    """

    steps: int = 4_000_000
    size: int = 32 * 1024 * 1024
    cpu_s: float = 5.0
