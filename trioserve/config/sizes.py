"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from trioserve.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
SIZE = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """The bytes that ``text`` stands for: "2GiB", "512 MiB", "1.5GB", or a plain number of bytes.

    KiB, MiB, GiB, TiB are powers of 1024 and kB, MB, GB, TB powers of 1000, in any case of letters;
    a part of a byte is dropped.

    Raises:
        ConfigError: where the text is no size, or is over 2**63 - 1 bytes.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is no size; write bytes, or a number and a unit as in 2GiB")
    number, unit = match.groups()
    factor = UNITS.get(unit.upper())
    if factor is None:
        raise ConfigError(
            f"'{text}' is no size: unknown unit '{unit}'; known are KiB, MiB, GiB, TiB (1024) and "
            "kB, MB, GB, TB (1000)"
        )
    size = int(Fraction(number) * factor)
    if size >= 2**63:
        raise ConfigError(f"'{text}' is more bytes than any machine has")
    return size
