from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.config import parse_size
from trioserve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("1_000", 1000),
        ("2GiB", 2 * 1024**3),
        ("512 MiB", 512 * 1024**2),
        (" 1.5GB ", 1_500_000_000),
        ("1.5 gib", 1_610_612_736),
        ("10kB", 10_000),
        ("0.1TB", 100_000_000_000),
        ("1.0000000001 B", 1),
        ("7B", 7),
    ],
)
def test_reads(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1",
        "1e9",
        "2 G",
        "2Gi",
        "1.GiB",
        ".5GiB",
        "1,5GB",
        "2GiB x",
        "nan",
        "\uff12GiB",
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="no size"):
        parse_size(text)


def test_refuses_what_no_machine_has() -> None:
    assert parse_size(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(ConfigError, match="any machine"):
        parse_size(str(2**63))


@given(st.integers(0, 4000), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_binary_units_are_exact(number: int, unit: str) -> None:
    factor = 1024 ** (1 + ["KiB", "MiB", "GiB"].index(unit))
    assert parse_size(f"{number}{unit}") == number * factor
