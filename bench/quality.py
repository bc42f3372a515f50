"""What each weight layout costs in quality, against float32.

    python bench/quality.py [--layout fp16 --layout int8 --layout packed] [--threads 2]

A fixed text, the project's first decision records, goes through the default model in windows of 512
tokens. For each layout: how often its most likely token is that of float32, its perplexity divided
by float32's, the largest difference of a logit, and whether a window's logits depend on whether its
rows are computed at once or a few at a time. Prints a table on stderr and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import trio
from torch import Tensor

from trioserve.config.schema import ModelConfig
from trioserve.kernels.cpu.panel_product import PanelProduct
from trioserve.kernels.cpu.runtime import Team, cache_directory
from trioserve.models.panels import PROJECTIONS, PanelLinear
from trioserve.models.registry import load_model
from trioserve.models.resolve import resolve_model
from trioserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = sorted(ROOT.glob("docs/decisions/000[1-5]-*.md"))
LAYOUTS = {"fp16": "panels", "fbgemm": "fp16", "int8": "int8", "packed": "packed"}
WINDOW = 512
FEW = 3


class WholeSequence:
    """Attention over one sequence at once, or over its next few tokens; keeps keys and values."""

    def __init__(self, num_layers: int) -> None:
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: Any
    ) -> Tensor:
        if (kept := self._kept[layer]) is not None:
            key, value = torch.cat([kept[0], key]), torch.cat([kept[1], value])
        self._kept[layer] = key.clone(), value.clone()
        n, length = query.shape[0], key.shape[0]
        mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return mixed[0].transpose(0, 1).reshape(n, -1)


def logits_of(model: Any, token_ids: list[int], chunk: int) -> Tensor:
    """[n, vocab], ``chunk`` tokens at a time."""
    attention = WholeSequence(model.spec.num_layers)
    parts, start = [], 0
    for tokens in torch.tensor(token_ids).split(chunk):
        positions = torch.arange(start, start + len(tokens))
        start += len(tokens)
        rows = torch.arange(len(tokens))
        parts.append(model.forward(tokens, positions, attention, None, rows))
    return torch.cat(parts)


def load(resolved: Any, layout: str, product: PanelProduct) -> Any:
    """The model, its layers run one by one."""
    model = load_model(resolved, layout)
    for one in (
        model.head,
        *(getattr(each, name) for each in model.layers for name in PROJECTIONS),
    ):
        if isinstance(one, PanelLinear):
            one.product = product
    return model


def measure(model: Any, windows: list[list[int]], truth: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A layout's figures over all windows."""
    agreed = positions = 0
    loss, largest, chunked = 0.0, 0.0, 0.0
    for tokens, true in zip(windows, truth, strict=True):
        logits = logits_of(model, tokens, WINDOW)
        agreed += int((logits.argmax(-1) == true["best"]).sum())
        positions += len(tokens)
        targets = torch.tensor(tokens[1:])
        loss += float(F.cross_entropy(logits[:-1], targets, reduction="sum"))
        largest = max(largest, float((logits[::16] - true["some"]).abs().max()))
        if tokens is windows[0]:
            few = logits_of(model, tokens[:96], FEW)
            chunked = float((few - logits[:96]).abs().max())
    return {
        "positions": positions,
        "agreed": agreed / positions,
        "perplexity": math.exp(loss / (positions - len(windows))),
        "largest_difference": largest,
        "difference_by_rows": chunked,
        "weight_bytes": model.weight_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    resolved = trio.run(partial(resolve_model, ModelConfig(), report=lambda stage: None))
    text = "\n".join(path.read_text() for path in TEXT)
    token_ids = Tokenizer(resolved.tokenizer_path).encode(text)
    windows = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids), WINDOW)]
    product = PanelProduct(Team(arguments.threads, cache_directory()))
    truth = []
    model = load(resolved, "fp32", product)
    for tokens in windows:
        logits = logits_of(model, tokens, WINDOW)
        truth.append({"best": logits.argmax(-1), "some": logits[::16].clone()})
    results = {"fp32": measure(model, windows, truth)}
    del model
    for name in arguments.layout or LAYOUTS:
        results[name] = measure(load(resolved, LAYOUTS[name], product), windows, truth)
    for name, line in results.items():
        line["perplexity_ratio"] = line["perplexity"] / results["fp32"]["perplexity"]
        print(
            f"{name:8} top-1 {line['agreed']:7.2%}  perplexity x {line['perplexity_ratio']:.4f}  "
            f"largest difference {line['largest_difference']:.2e}  "
            f"{line['weight_bytes'] / 1e6:.0f} MB",
            file=sys.stderr,
        )
    print(json.dumps({"text_tokens": len(token_ids), "layouts": results}, indent=2))


if __name__ == "__main__":
    main()
