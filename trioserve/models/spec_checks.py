"""Bounds for what a checkpoint says of itself: absurd values are refused before memory is taken."""

from __future__ import annotations

import math

from trioserve.errors import ModelError
from trioserve.models.spec import ModelSpec

# Generous: several times what the largest published models have.
LIMITS = {
    "num_layers": 1024,
    "hidden_size": 1 << 18,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position": 1 << 28,
}
ACTIVATIONS = ("silu",)


def check_spec(spec: ModelSpec, where: str) -> None:
    """Raise ModelError, naming ``where`` and the field, if the shape cannot be a model's."""
    for name, limit in LIMITS.items():
        value = getattr(spec, name)
        if not 1 <= value <= limit:
            raise ModelError(f"{where}: {name} is {value}, must be 1 to {limit}")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{where}: num_heads is {spec.num_heads}, no multiple of num_kv_heads, "
            f"{spec.num_kv_heads}"
        )
    if spec.head_dim % 2:
        raise ModelError(f"{where}: head_dim is {spec.head_dim}, rotary positions need it even")
    for name in ("rms_norm_eps", "rope_theta"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{where}: {name} is {value}, must be above 0")
    if spec.hidden_act not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise ModelError(
            f"{where}: activation {spec.hidden_act} unsupported, supported: {supported}"
        )
    _check_scaling(spec, where)
    _check_token_ids(spec, where)


def _check_scaling(spec: ModelSpec, where: str) -> None:
    scaling = spec.rope_scaling
    if scaling is None:
        return
    if not (math.isfinite(scaling.factor) and scaling.factor >= 1):
        raise ModelError(f"{where}: rope scaling factor is {scaling.factor}, must be at least 1")
    if scaling.kind == "llama3" and not (
        0 < scaling.low_freq_factor < scaling.high_freq_factor < math.inf
        and scaling.original_max_position > 0
    ):
        raise ModelError(
            f"{where}: rope scaling needs 0 < low_freq_factor < high_freq_factor and a positive "
            f"original length, found {scaling.low_freq_factor}, {scaling.high_freq_factor} and "
            f"{scaling.original_max_position}"
        )


def _check_token_ids(spec: ModelSpec, where: str) -> None:
    named = [("eos_token_id", token_id) for token_id in spec.eos_token_ids]
    if spec.bos_token_id is not None:
        named.append(("bos_token_id", spec.bos_token_id))
    for name, token_id in named:
        if not 0 <= token_id < spec.vocab_size:
            raise ModelError(
                f"{where}: {name} is {token_id}, outside the vocabulary of {spec.vocab_size}"
            )
