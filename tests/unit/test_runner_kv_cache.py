"""Sizing of the KV cache: a table of cases, the messages, and that it is monotone."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.config.schema import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from trioserve.core.batch import MemoryProfile
from trioserve.core.kv_cache import AUTO_CAP_BYTES, KVCachePlan, format_bytes, plan_kv_cache
from trioserve.errors import StartupError

MIB, GIB = 1 << 20, 1 << 30
TOKEN = 32 << 10  # 2 MiB make 64 tokens, 4 blocks of 16


def profile(free: int = 16 * GIB, **changes: int) -> MemoryProfile:
    values = {
        "total_bytes": 24 * GIB,
        "free_bytes": free,
        "weight_bytes": 270 * MIB,
        "activation_bytes": 100 * MIB,
    }
    return MemoryProfile(**values | changes)


def config(
    memory: str | int = "auto",
    max_model_len: int | str = "auto",
    *,
    seqs: int = 64,
    fraction: float = 0.5,
    block_size: int = 16,
) -> Config:
    return Config(
        model=ModelConfig(max_model_len=max_model_len),  # type: ignore[arg-type]
        cache=CacheConfig(memory=memory, block_size=block_size),
        device=DeviceConfig(memory_fraction=fraction),
        scheduler=SchedulerConfig(max_num_seqs=seqs),
    )


def plan(
    settings: Config, measured: MemoryProfile | None = None, model_max_len: int = 8192
) -> KVCachePlan:
    return plan_kv_cache(
        measured or profile(),
        bytes_per_token=TOKEN,
        config=settings,
        model_max_len=model_max_len,
    )


@pytest.mark.parametrize(
    ("settings", "measured", "num_blocks", "max_model_len"),
    [
        # Explicit: exactly what was asked for, in whole blocks; the length fits it.
        (config("64MiB"), profile(), 128, 2048),
        (config(64 * MIB), profile(), 128, 2048),
        (config("1GiB"), profile(), 2048, 8192),
        (config("1GiB", 100), profile(), 2048, 100),
        (config(64 * MIB + TOKEN), profile(), 128, 2048),
        (config("64MiB", block_size=64), profile(), 32, 2048),
        # Auto: the share of what is free besides working memory.
        (config(fraction=0.5), profile(2 * GIB + 100 * MIB), 2048, 8192),
        (config(fraction=1.0), profile(2 * GIB + 100 * MIB), 4096, 8192),
        # Auto: no more than all sequences at full length can use.
        (config(max_model_len=512, seqs=4), profile(), 4 * 32, 512),
        (config(max_model_len=513, seqs=1), profile(), 33, 513),
        # Auto: within the cap on a large machine.
        (config(), profile(100 * GIB), AUTO_CAP_BYTES // TOKEN // 16, 8192),
        # Auto: the cap gives way to large weights.
        (config(), profile(100 * GIB, weight_bytes=8 * GIB), 8 * GIB // TOKEN // 16, 8192),
        # Auto: a length that does not fit is cut to the largest that does.
        (config(fraction=0.5), profile(164 * MIB), 64, 1024),
    ],
)
def test_sizes(
    settings: Config, measured: MemoryProfile, num_blocks: int, max_model_len: int
) -> None:
    result = plan(settings, measured)
    assert result.num_blocks == num_blocks
    assert result.max_model_len == max_model_len
    assert result.kv_bytes == num_blocks * 16 * TOKEN * settings.cache.block_size // 16


def test_the_cap_gives_way_to_one_full_sequence() -> None:
    """262,144 tokens need 8 GiB; a context that memory can hold is not refused by the cap."""
    result = plan(config(max_model_len=262144, fraction=0.9), model_max_len=262144)
    assert result.max_model_len == 262144


def test_st_09_too_small_for_one_sequence_says_everything() -> None:
    with pytest.raises(StartupError) as caught:
        plan(config(1000 * TOKEN, 4096), profile(16 * GIB))
    cause = caught.value.cause
    assert caught.value.stage == "kv-cache"
    assert "\n" not in cause
    for part in (
        "holds 992 tokens",
        "max_model_len = 4096",
        "set it to 992, the largest that starts",
        "or to auto",
        "raise [cache] memory",
        "24.0 GiB total",
        "16.0 GiB free",
        "270.0 MiB of weights",
        "100.0 MiB working memory",
        f"{TOKEN} bytes a token",
        "1000 tokens",
    ):
        assert part in cause, part


def test_the_length_it_names_starts() -> None:
    with pytest.raises(StartupError) as caught:
        plan(config(1000 * TOKEN, 4096))
    found = re.search(r"set it to (\d+), the largest", caught.value.cause)
    assert found is not None
    largest = int(found[1])
    assert plan(config(1000 * TOKEN, largest)).max_model_len == largest
    with pytest.raises(StartupError):
        plan(config(1000 * TOKEN, largest + 1))


def test_nothing_left_beside_the_weights() -> None:
    """A limit below the weights leaves nothing, or less: no division, no assertion."""
    for free in (0, 50 * MIB, 100 * MIB, 100 * MIB + 16 * TOKEN):
        with pytest.raises(StartupError, match="cannot hold one block of 16 tokens") as caught:
            plan(config(), profile(free))
        assert "raise [device] memory_fraction" in caught.value.cause
        assert "memory_fraction 0.5" in caught.value.cause


def test_more_than_is_free_is_refused_before_it_is_touched() -> None:
    with pytest.raises(StartupError, match=r"\[cache\] memory is 20.0 GiB, more than") as caught:
        plan(config("20GiB"), profile(16 * GIB))
    assert "lower it to 15.9 GiB" in caught.value.cause


def test_a_length_over_the_models_own_is_refused() -> None:
    with pytest.raises(StartupError, match="over the model's own limit of 8192"):
        plan(config(max_model_len=8193))


@given(
    free=st.integers(0, 4 * GIB),
    memory=st.one_of(st.just("auto"), st.integers(0, 2 * GIB)),
    shorter=st.integers(1, 8192),
    longer=st.integers(1, 8192),
    seqs=st.integers(1, 100),
)
def test_st_09_a_shorter_context_never_fails_where_a_longer_one_starts(
    free: int, memory: int | str, shorter: int, longer: int, seqs: int
) -> None:
    shorter, longer = sorted((shorter, longer))
    measured = profile(free)

    def starts(length: int) -> bool:
        try:
            result = plan(config(memory, length, seqs=seqs), measured)
        except StartupError:
            return False
        assert result.max_model_len == length
        assert result.num_blocks * 16 >= length
        return True

    if starts(longer):
        assert starts(shorter)
        auto = plan(config(memory, seqs=seqs), measured)
        assert auto.max_model_len >= longer


@given(free=st.integers(0, 1 << 40), change=st.integers(-GIB, GIB))
def test_st_09_neighbours_change_the_size_but_break_nothing(free: int, change: int) -> None:
    """Another process takes or gives back memory between two reads: a size or a plain refusal."""
    for measured in (profile(free), profile(max(0, free + change))):
        try:
            result = plan(config(), measured)
        except StartupError:
            continue
        assert 0 < result.kv_bytes <= measured.free_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * GIB, "5.0 GiB"), (1 << 41, "2.0 TiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
