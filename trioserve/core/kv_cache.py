"""How large the KV cache becomes. Pure: numbers in, numbers out.

The cache's budget does not depend on the context length that is asked for, and a length needs more
blocks the longer it is; so a shorter context never fails where a longer one starts.
"""

from __future__ import annotations

from attrs import frozen

from trioserve.config.schema import Config
from trioserve.config.sizes import parse_size
from trioserve.core.batch import MemoryProfile
from trioserve.errors import StartupError

AUTO_CAP_BYTES = 4 << 30
"""What `[cache] memory = auto` stays within on a machine whose memory is everybody's, unless the
weights are larger than that, or one sequence of full length needs more."""


@frozen(kw_only=True)
class KVCachePlan:
    """The cache as it will be allocated. One sequence of ``max_model_len`` always fits."""

    num_blocks: int
    max_model_len: int
    kv_bytes: int


def plan_kv_cache(
    profile: MemoryProfile,
    *,
    bytes_per_token: int,
    config: Config,
    model_max_len: int,
    auto_cap_bytes: int = AUTO_CAP_BYTES,
) -> KVCachePlan:
    """Size the cache.

    Args:
        profile: memory as measured; free memory is what this process could still take, so what
            neighbours take or give back before or after does not matter here.
        bytes_per_token: of the cache, over all layers.
        model_max_len: longest sequence the model was made for, in tokens.
        auto_cap_bytes: see AUTO_CAP_BYTES.

    Raises:
        StartupError: ``[model] max_model_len`` is over the model's own limit, or the cache cannot
            hold one sequence of it; the message has all sizes and the largest length that starts.
        ConfigError: ``[cache] memory`` is no size.
    """
    asked = config.model.max_model_len
    if asked != "auto" and asked > model_max_len:
        raise StartupError(
            "kv-cache",
            f"[model] max_model_len = {asked} is over the model's own limit of {model_max_len} "
            f"tokens; set it to {model_max_len} or less, or to auto",
        )
    block_size = config.cache.block_size
    block_bytes = bytes_per_token * block_size
    available = max(0, profile.free_bytes - profile.activation_bytes)
    full_length = model_max_len if asked == "auto" else asked
    full_blocks = -(-full_length // block_size)
    memory = config.cache.memory
    if memory == "auto":
        planned = int(available * config.device.memory_fraction)
        cap = max(auto_cap_bytes, profile.weight_bytes, full_blocks * block_bytes)
        budget = min(planned, cap, config.scheduler.max_num_seqs * full_blocks * block_bytes)
    else:
        budget = parse_size(memory) if isinstance(memory, str) else memory
    num_blocks = budget // block_bytes
    largest = min(num_blocks * block_size, model_max_len)
    sizes = _sizes(profile, bytes_per_token, budget, config)
    if memory != "auto" and budget > available:
        raise StartupError(
            "kv-cache",
            f"[cache] memory is {format_bytes(budget)}, more than this process can still take; "
            f"lower it to {format_bytes(available)} or less, or set it to auto ({sizes})",
        )
    if num_blocks == 0:
        raise StartupError(
            "kv-cache",
            f"the KV cache cannot hold one block of {block_size} tokens "
            f"({format_bytes(block_bytes)}), so no context starts; {_remedy(config)} ({sizes})",
        )
    if asked != "auto" and full_blocks > num_blocks:
        raise StartupError(
            "kv-cache",
            f"the KV cache holds {num_blocks * block_size} tokens and one sequence of [model] "
            f"max_model_len = {asked} needs {asked}; set it to {largest}, the largest that "
            f"starts, or to auto, which fits it, or {_remedy(config)} ({sizes})",
        )
    return KVCachePlan(
        num_blocks=num_blocks,
        max_model_len=min(largest, full_length),
        kv_bytes=num_blocks * block_bytes,
    )


def _remedy(config: Config) -> str:
    if config.cache.memory == "auto":
        return "free memory, raise [device] memory_fraction or take a smaller model"
    return "raise [cache] memory"


def _sizes(profile: MemoryProfile, bytes_per_token: int, budget: int, config: Config) -> str:
    """Every number that entered the decision, for a person."""
    return (
        f"memory: {format_bytes(profile.total_bytes)} total, "
        f"{format_bytes(profile.free_bytes)} free beside {format_bytes(profile.weight_bytes)} "
        f"of weights, {format_bytes(profile.activation_bytes)} working memory; "
        f"cache: {format_bytes(budget)} at {bytes_per_token} bytes a token, "
        f"{max(0, budget) // bytes_per_token} tokens"
        + (
            f", memory_fraction {config.device.memory_fraction:g}"
            if config.cache.memory == "auto"
            else ""
        )
    )


def format_bytes(count: int) -> str:
    """A size for a person: "512 B", "45.0 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
