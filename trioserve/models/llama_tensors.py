"""The tensors a Llama checkpoint consists of: names as transformers writes them, and shapes.

Shapes are ``[out, in]``, as ``torch.nn.Linear`` stores them, and ``[rows, hidden]`` for embeddings.
"""

from __future__ import annotations

from trioserve.models.spec import ModelSpec


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter; ``lm_head.weight`` only where it is not tied."""
    hidden = spec.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: shape for name, shape in _layer_tensors(spec).items()}
    tensors["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, hidden)
    return tensors


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, shape in projections.items():
        tensors[f"{name}.weight"] = shape
        if spec.attention_bias if name.startswith("self_attn") else spec.mlp_bias:
            tensors[f"{name}.bias"] = shape[:1]
    return tensors
