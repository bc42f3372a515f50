"""GGUF metadata → ``ModelSpec``."""

from __future__ import annotations

import math
from typing import Any

from trioserve.errors import ModelError
from trioserve.models.gguf_header import GGUFArray, GGUFHeader
from trioserve.models.spec import ModelSpec, RopeScaling
from trioserve.models.spec_checks import check_spec
from trioserve.models.spec_from_config import Fields

SUPPORTED = ("llama",)
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_FACTORS = "rope_freqs.weight"


def spec_from_gguf(header: GGUFHeader) -> ModelSpec:
    """The spec that a GGUF file describes; the embedding is tied where ``output.weight`` is absent.

    Raises:
        ModelError: an architecture or feature that is not supported, a key missing or absurd.
    """
    fields = Fields(header.metadata, str(header.path))
    architecture = fields.text("general.architecture", "")
    if architecture not in SUPPORTED:
        raise ModelError(
            f"{header.path}: architecture {architecture or 'unnamed'} unsupported, "
            f"supported: {', '.join(SUPPORTED)}"
        )
    names = {tensor.name for tensor in header.tensors}
    head = f"{architecture}."
    fields.require(
        *(
            head + key
            for key in (
                "block_count",
                "embedding_length",
                "feed_forward_length",
                "attention.head_count",
                "attention.layer_norm_rms_epsilon",
            )
        )
    )
    if fields.integer(head + "expert_count", 0) > 0:
        raise ModelError(f"{header.path}: mixtures of experts are unsupported")
    hidden_size = fields.integer(head + "embedding_length")
    num_heads = max(fields.integer(head + "attention.head_count"), 1)
    head_dim = _head_dim(fields, head, hidden_size // num_heads)
    rope_theta = _decimal(fields.number(head + "rope.freq_base", 10000.0))
    # A sentencepiece vocabulary that does not say has these.
    defaults = (1, 2) if header.metadata.get("tokenizer.ggml.model") == "llama" else ()
    spec = ModelSpec(
        architecture=architecture,
        num_layers=fields.integer(head + "block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer(head + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(head + "feed_forward_length"),
        vocab_size=len(vocabulary(header)),
        max_position=fields.integer(head + "context_length", 2048),
        rms_norm_eps=_decimal(fields.number(head + "attention.layer_norm_rms_epsilon")),
        rope_theta=rope_theta,
        rope_scaling=_scaling(fields, head, header, head_dim, rope_theta),
        tie_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        eos_token_ids=_token_ids(fields, *EOS_KEYS) or defaults[1:],
        bos_token_id=next(iter((*_token_ids(fields, "bos_token_id"), *defaults[:1])), None),
    )
    check_spec(spec, str(header.path))
    return spec


def vocabulary(header: GGUFHeader) -> GGUFArray:
    """The token texts, by id. ModelError where the file has none."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, GGUFArray) or not len(tokens):
        raise ModelError(f"{header.path} has no tokenizer (key tokenizer.ggml.tokens)")
    return tokens


def _head_dim(fields: Fields, head: str, default: int) -> int:
    head_dim = fields.integer(head + "attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = fields.integer(head + key, head_dim)
        if value != head_dim:
            raise ModelError(
                f"{fields.where}: {head}{key} is {value}, other than the head size {head_dim} is "
                "unsupported"
            )
    return head_dim


def _token_ids(fields: Fields, *keys: str) -> tuple[int, ...]:
    ids = [token_id for key in keys for token_id in fields.token_ids(f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(ids))


def _decimal(value: float) -> float:
    """The short decimal a 32-bit float was made from: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _scaling(
    fields: Fields, head: str, header: GGUFHeader, head_dim: int, theta: float
) -> RopeScaling | None:
    kind = fields.text(head + "rope.scaling.type", "none")
    factor = fields.number(
        head + "rope.scaling.factor", fields.number(head + "rope.scale_linear", 1.0)
    )
    if kind not in ("none", "linear"):
        raise ModelError(f"{fields.where}: rope type {kind} unsupported, supported: none, linear")
    factors = next((tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is not None:
        if factors.dtype != "F32" or factors.shape != (head_dim // 2,):
            raise ModelError(f"{fields.where}: {ROPE_FACTORS} must be F32 of {head_dim // 2}")
        return scaling_from_factors(header.floats(factors), theta, fields.where)
    return RopeScaling(kind="linear", factor=_decimal(factor)) if factor != 1.0 else None


def scaling_from_factors(
    factors: tuple[float, ...], theta: float, where: str
) -> RopeScaling | None:
    """The scaling behind ``rope_freqs.weight``: one divisor per frequency, made by Llama 3's rule.

    The file keeps the divisors only. Llama 3 has always used 1, 4 and 8192 for the other numbers;
    the divisors are recomputed from them and must agree.

    Raises:
        ModelError: they were made by another rule.
    """
    scaling = RopeScaling(kind="llama3", factor=_decimal(max(factors)))
    if all(factor == 1.0 for factor in factors):
        return None
    for index, factor in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (index / len(factors))
        if not math.isclose(factor, llama3_divisor(wavelength, scaling), rel_tol=1e-4):
            raise ModelError(f"{where}: {ROPE_FACTORS} follows no known rule, unsupported")
    return scaling


def llama3_divisor(wavelength: float, scaling: RopeScaling) -> float:
    """What a frequency of that wavelength, in tokens, is divided by.

    ``factor`` for waves longer than the original context, 1 for those that fit in it several times,
    and between them a blend of the frequencies.
    """
    turns = scaling.original_max_position / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1.0 / (share + (1.0 - share) / scaling.factor)


def text_at(tokens: GGUFArray, token_id: int | None) -> str:
    """The text of a token; empty where there is none."""
    value: Any = None if token_id is None else tokens.at(token_id)
    return value if isinstance(value, str) else ""
