"""What is known of a model before a byte of its weights is read.

Made in the parent by ``trioserve.models.inspect`` (stdlib only), sent to the worker inside
``Init`` and trusted there. attrs classes of plain values, so that msgspec carries them as they are.
"""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from trioserve.models.generation import GenerationDefaults


@frozen(kw_only=True)
class RopeScaling:
    """Rotary scaling as Llama 3 defines it (``kind="llama3"``) or linear (``kind="linear"``)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@frozen(kw_only=True)
class ModelSpec:
    """The shape of a model; one class for every source format.

    ``config.json`` and GGUF metadata both end here. ``max_position`` is the longest sequence the
    model was made for, in tokens.
    """

    architecture: str  # the module in trioserve.models, e.g. "llama"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tasks: tuple[str, ...] = ("generate",)


@frozen(kw_only=True)
class TensorInfo:
    """Where one tensor lies: file, storage type, shape (outermost first), byte range."""

    name: str  # as the checkpoint calls it
    path: str
    dtype: str  # "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file
    num_bytes: int


@frozen(kw_only=True)
class ResolvedModel:
    """A model found, fetched and inspected: all that the worker needs to load it."""

    name: str  # the default served name
    source: str  # as configured
    format: Literal["safetensors", "gguf", "random"]
    spec: ModelSpec
    tensors: tuple[TensorInfo, ...] = field(default=(), repr=False)
    tokenizer_path: str  # a tokenizer.json that the `tokenizers` library reads
    num_token_ids: int | None = None  # ids from here on are padding of the model: never sampled
    chat_template: str | None = field(default=None, repr=False)
    bos_token: str = ""
    eos_token: str = ""
    seed: int = 0  # of the weights, for format "random"
    generation: GenerationDefaults = field(
        factory=GenerationDefaults
    )  # where a request says nothing
    warnings: tuple[str, ...] = ()  # odd, but no reason to refuse: one line each

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored in the checkpoint."""
        return sum(tensor.num_bytes for tensor in self.tensors)
