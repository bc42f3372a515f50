"""``config.json`` as transformers writes it → ``ModelSpec``. Versions 4 and 5 of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trioserve.errors import ModelError
from trioserve.models.spec import ModelSpec, RopeScaling
from trioserve.models.spec_checks import check_spec


class Fields:
    """A JSON object read field by field; every error names the file and the field."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; ``default`` where the field is absent or null."""
        value = self._get(name, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """An integer or a float, as a float."""
        value = self._get(name, default)
        if type(value) not in (int, float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._get(name, default)
        if type(value) is not str:
            raise self._wrong(name, value, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one, as a list, as null or not at all."""
        value = self.values.get(name)
        value = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in value):
            raise self._wrong(name, value, "a token id or a list of them")
        return tuple(dict.fromkeys(value))

    def table(self, name: str) -> Fields | None:
        """A nested object, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self.where}: {name}")

    def require(self, *names: str) -> None:
        """Raise ModelError naming all of ``names`` that are absent."""
        missing = [name for name in names if self.values.get(name) is None]
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise ModelError(f"{self.where}: missing field{plural} {', '.join(missing)}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            self.require(name)
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelError(f"{self.where}: {name} is {shown}, expected {expected}")


def spec_from_config(
    config: dict[str, Any], generation_config: dict[str, Any], path: Path
) -> ModelSpec:
    """The spec that ``config.json`` at ``path`` describes, its stop tokens those of both files.

    Raises:
        ModelError: an architecture or feature that is not supported, a field missing or absurd.
    """
    fields = Fields(config, str(path))
    make = _architecture(fields)
    if config.get("quantization_config") is not None:
        method = (fields.table("quantization_config") or fields).values.get("quant_method")
        raise ModelError(
            f"{path}: quantized checkpoints of this kind ({method or 'unnamed'}) are unsupported; "
            "use the unquantized model, or a GGUF file"
        )
    generation = Fields(generation_config, str(path.with_name("generation_config.json")))
    eos = (*fields.token_ids("eos_token_id"), *generation.token_ids("eos_token_id"))
    spec = make(fields, tuple(dict.fromkeys(eos)))
    check_spec(spec, str(path))
    return spec


def _architecture(fields: Fields) -> Callable[[Fields, tuple[int, ...]], ModelSpec]:
    names = fields.values.get("architectures")
    if not names:
        # Old checkpoints name only the family.
        names = [FAMILIES.get(str(fields.values.get("model_type")))]
        if names == [None]:
            fields.require("architectures")
    name = names[0] if isinstance(names, list) else names
    make = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if make is None:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{fields.where}: architecture {name or 'unnamed'} unsupported, supported: {supported}"
        )
    return make


def _llama(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """Defaults are those of transformers' LlamaConfig."""
    fields.require(
        "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
    )
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if num_heads < 1:
        raise ModelError(f"{fields.where}: num_attention_heads is {num_heads}, must be at least 1")
    max_position = fields.integer("max_position_embeddings", 2048)
    rope_theta, rope_scaling = _rope(fields, max_position)
    activation = fields.text("hidden_act", "silu")
    return ModelSpec(
        architecture="llama",
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        hidden_act="silu" if activation == "swish" else activation,
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
    )


ARCHITECTURES = {"LlamaForCausalLM": _llama}
FAMILIES = {"llama": "LlamaForCausalLM"}


def _rope(fields: Fields, max_position: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling. transformers 5 keeps both in ``rope_parameters``; 4 had ``rope_theta``
    beside a ``rope_scaling`` whose kind was called ``type`` at first and ``rope_type`` later."""
    rope = fields.table("rope_parameters") or fields.table("rope_scaling")
    theta = fields.number("rope_theta", 10000.0)
    if rope is None:
        return theta, None
    theta = rope.number("rope_theta", theta)
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{holder.where}: partial_rotary_factor other than 1 is unsupported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind != "llama3":
        raise ModelError(
            f"{rope.where}: rope type {kind} unsupported, supported: default, linear, llama3"
        )
    return theta, RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )
