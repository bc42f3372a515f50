"""The plainest attention there is: one sequence, its keys and values in one tensor a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class CausalAttention:
    """Keeps a sequence's keys and values; ``forward`` adds to them and attends."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    @property
    def length(self) -> int:
        return 0 if self.keys[-1] is None else self.keys[-1].shape[0]

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, context) -> Tensor:
        if self.keys[layer] is not None:
            key = torch.cat([self.keys[layer], key])
            value = torch.cat([self.values[layer], value])
        self.keys[layer], self.values[layer] = key.clone(), value.clone()
        n, length = query.shape[0], key.shape[0]
        mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return mixed[0].transpose(0, 1).reshape(n, -1)


def logits_of(model, token_ids: list[int], chunk: int = 0) -> Tensor:
    """Logits ``[n, vocab]`` of every token of one sequence, computed ``chunk`` tokens at a time."""
    attention = CausalAttention(model.spec.num_layers)
    parts = []
    for tokens in torch.tensor(token_ids).split(chunk or len(token_ids)):
        positions = torch.arange(attention.length, attention.length + len(tokens))
        rows = torch.arange(len(tokens))
        parts.append(model.forward(tokens, positions, attention, None, rows))
    return torch.cat(parts)


def greedy(model, token_ids: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation, one token at a time behind the prompt."""
    attention = CausalAttention(model.spec.num_layers)
    answer: list[int] = []
    feed = token_ids
    for _ in range(max_tokens):
        positions = torch.arange(attention.length, attention.length + len(feed))
        last = torch.tensor([len(feed) - 1])
        logits = model.forward(torch.tensor(feed), positions, attention, None, last)
        answer.append(int(logits.argmax()))
        feed = answer[-1:]
    return answer
