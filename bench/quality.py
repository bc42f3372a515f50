"""What each weight layout, and rounding what is multiplied with it, costs in quality.

    python bench/quality.py [--layout fp16 --layout int8 --layout packed] [--simulate] [--threads 2]

A fixed text, the project's first decision records as they once were, goes through the default model
in windows of 512 tokens. For each layout: how often its most likely token is that of float32, its
perplexity divided by float32's, the largest difference of a logit, and how far a window's logits
depend on whether its rows are computed at once or a few at a time. Where the processor has a tile
unit, each of our own layouts is measured with rows of float32 and with rows rounded to bfloat16, as
`[model] dtype` has them. With --simulate also what other ways to round would cost, on float32
weights. Prints a table on stderr and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
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
from trioserve.kernels.cpu.whole_panels import KINDS
from trioserve.kernels.cpu.whole_product import PRESENT, WholeProduct
from trioserve.models.linear import DYNAMIC
from trioserve.models.panels import PROJECTIONS, PanelLinear
from trioserve.models.registry import load_model
from trioserve.models.resolve import resolve_model
from trioserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "bench/lib/quality.txt"
LAYOUTS = {
    "fp16": "panels",
    "fbgemm": "fp16",
    "int8": "int8",
    "packed": "packed",
    "int8-dynamic": "int8-dynamic",
    "int16-dynamic": "int16-dynamic",
}
OURS = ("fp16", "int8", "packed")
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


def to_bits(x: Tensor, size: int | None = None, bits: int = 8) -> Tensor:
    """Rounded to so many bits with a scale for each ``size`` inputs, or for each row."""
    groups = x.unflatten(-1, (-1, size or x.shape[-1]))
    scales = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    codes = torch.where(scales > 0, groups / scales, 0.0).round()
    return (codes * scales).flatten(-2)


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def as_it_is(x: Tensor) -> Tensor:
    return x


def all_but(name: str) -> list[str]:
    return [each for each in (*PROJECTIONS, "head") if each != name]


Rounding = Callable[[Tensor], Tensor]
SIMULATED: dict[str, tuple[Rounding, Rounding, tuple[str, ...]]] = {
    # how rows and weights are rounded, and which projections are left alone
    "rows bfloat16": (to_bfloat16, as_it_is, ()),
    "both bfloat16": (to_bfloat16, to_bfloat16, ()),
    "rows 8 bits, 32 to a scale": (partial(to_bits, size=32), as_it_is, ()),
    "the same but for down": (partial(to_bits, size=32), as_it_is, ("down",)),
    "the same but for down, head": (partial(to_bits, size=32), as_it_is, ("down", "head")),
    "rows 8 bits, one scale": (to_bits, as_it_is, ()),
    "rows 16 bits, one scale": (partial(to_bits, bits=16), as_it_is, ()),
    "rows and weights 16 bits": (partial(to_bits, bits=16), partial(to_bits, bits=16), ()),
    "weights 8 bits, one scale": (as_it_is, to_bits, ()),
    **{
        f"the same, {name} alone": (as_it_is, to_bits, tuple(all_but(name)))
        for name in (*PROJECTIONS, "head")
    },
    "the same, gate_up and output": (as_it_is, to_bits, ("qkv", "down", "head")),
}


class Simulated:
    """A float32 projection whose operands are rounded before the product."""

    def __init__(self, linear: Any, rows: Rounding, weights: Rounding) -> None:
        self._rows, self._weight, self._bias = rows, weights(linear._weight), linear._bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(self._rows(x), self._weight, self._bias)


def simulate(model: Any, rows: Rounding, weights: Rounding, left: tuple[str, ...]) -> None:
    """Round in all projections of a float32 model but some."""
    for layer in model.layers:
        for name in PROJECTIONS:
            if name not in left:
                setattr(layer, name, Simulated(getattr(layer, name), rows, weights))
    if "head" not in left:
        model.head = Simulated(model.head, rows, weights)


def load(resolved: Any, layout: str, product: PanelProduct, whole: WholeProduct | None) -> Any:
    """The model, its layers run one by one."""
    model = load_model(resolved, layout)
    for one in (
        model.head,
        *(getattr(each, name) for each in model.layers for name in PROJECTIONS),
    ):
        if isinstance(one, PanelLinear):
            one.product = whole if one.panels.kind in KINDS else product
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
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    resolved = trio.run(partial(resolve_model, ModelConfig(), report=lambda stage: None))
    text = TEXT.read_text()
    token_ids = Tokenizer(resolved.tokenizer_path).encode(text)
    windows = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids), WINDOW)]
    teams = {
        "": Team(arguments.threads, cache_directory()),
        ", bfloat16": Team(arguments.threads, cache_directory(), rounded=True),
    }
    products = {name: PanelProduct(team) for name, team in teams.items()}
    product = products[""]
    truth = []
    whole = WholeProduct(teams[""]) if PRESENT else None
    model = load(resolved, "fp32", product, whole)
    for tokens in windows:
        logits = logits_of(model, tokens, WINDOW)
        truth.append({"best": logits.argmax(-1), "some": logits[::16].clone()})
    results = {"fp32": measure(model, windows, truth)}
    del model
    for name in arguments.layout or LAYOUTS:
        if LAYOUTS[name] in DYNAMIC and whole is None:
            continue  # the processor cannot
        results[name] = measure(load(resolved, LAYOUTS[name], product, whole), windows, truth)
        if name in OURS and teams[", bfloat16"].parts == 1:
            rounded = load(resolved, LAYOUTS[name], products[", bfloat16"], whole)
            results[f"{name}, bfloat16"] = measure(rounded, windows, truth)
    for name, how in SIMULATED.items() if arguments.simulate else ():
        model = load(resolved, "fp32", product, whole)
        simulate(model, *how)
        results[name] = measure(model, windows, truth)
    for name, line in results.items():
        line["perplexity_ratio"] = line["perplexity"] / results["fp32"]["perplexity"]
        print(
            f"{name:28} top-1 {line['agreed']:7.2%}  perplexity x {line['perplexity_ratio']:.4f}  "
            f"largest difference {line['largest_difference']:.2e}, "
            f"by rows {line['difference_by_rows']:.1e}  "
            f"{line['weight_bytes'] / 1e6:.0f} MB",
            file=sys.stderr,
        )
    print(json.dumps({"text_tokens": len(token_ids), "layouts": results}, indent=2))


if __name__ == "__main__":
    main()
