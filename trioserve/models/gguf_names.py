"""GGUF's tensor names and transformers' for the Llama family.

Names only. The values of ``attn_q`` and ``attn_k`` differ too: GGUF keeps the two halves of each
rotary pair beside each other, transformers half a head apart. Row ``head * d + 2 * i + j`` of GGUF
is row ``head * d + j * d / 2 + i`` of transformers, for head size d, i < d / 2, j in {0, 1}; the
loader puts them back.
"""

from __future__ import annotations

import re

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_BACK = {hf: gguf for gguf, hf in TOP.items()}
LAYER_BACK = {hf: gguf for gguf, hf in LAYER.items()}


def hf_name(gguf: str) -> str | None:
    """transformers' name for ``blk.0.attn_q.weight`` and the like, or None."""
    stem, _, kind = gguf.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found and found[2] in LAYER:
        return f"model.layers.{int(found[1])}.{LAYER[found[2]]}.{kind}"
    return None


def gguf_name(hf: str) -> str | None:
    """GGUF's name for ``model.layers.0.self_attn.q_proj.weight`` and the like, or None."""
    stem, _, kind = hf.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in TOP_BACK:
        return f"{TOP_BACK[stem]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)", stem)
    if found and found[2] in LAYER_BACK:
        return f"blk.{int(found[1])}.{LAYER_BACK[found[2]]}.{kind}"
    return None
