"""Which weight layout is quickest, by rows and shape?

    python bench/linear.py [--threads 2] [--seconds 0.2]

Products of the SmolLM2-135M shapes, and of a larger model's, with 1 to 512 rows. The weights of a
shape are cycled through so that they do not stay in the cache. Prints one JSON object: for each
shape and number of rows, microseconds per product by kernel, and what that means in GFLOP/s and, at
one row, in GB/s of weights. ``legacy_fp16`` is torch's deprecated entry point, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trioserve.models.linear import Fp32Linear, PackedFp16Linear

SHAPES = {
    "qkv": (960, 576),
    "output": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
    "large": (4096, 4096),
}
ROWS = (1, 8, 32, 128, 512)
CYCLED_BYTES = 100e6  # beyond any cache, in float32


def legacy_fp16(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product through torch's older functions."""
    packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    bias = torch.zeros(weight.shape[0])
    return lambda x: torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)


KERNELS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "fp32": Fp32Linear,
    "fp16": PackedFp16Linear,
    "legacy_fp16": legacy_fp16,
}


def measure(products: list[Callable[[Tensor], Tensor]], x: Tensor, seconds: float) -> float:
    """Microseconds per product: the best of three turns."""
    for product in products:
        product(x)
    best = float("inf")
    for _ in range(3):
        count, started = 0, time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds / 3:
            for product in products:
                product(x)
            count += len(products)
        best = min(best, spent / max(count, 1))
    return best * 1e6


def results(seconds: float) -> Iterator[dict]:
    """One line per shape and number of rows."""
    for name, (rows, columns) in SHAPES.items():
        copies = max(2, int(CYCLED_BYTES / (rows * columns * 4)))
        weights = [torch.randn(rows, columns) * 0.02 for _ in range(copies)]
        products = {kernel: [make(w) for w in weights] for kernel, make in KERNELS.items()}
        for n in ROWS:
            x = torch.randn(n, columns)
            line: dict = {"shape": name, "out": rows, "in": columns, "rows": n}
            for kernel, cycle in products.items():
                microseconds = measure(cycle, x, seconds)
                line[kernel] = {
                    "us": round(microseconds, 1),
                    "gflops": round(2e-3 * n * rows * columns / microseconds, 1),
                }
                if n == 1:
                    width = 4 if kernel == "fp32" else 2
                    line[kernel]["gb_per_s"] = round(
                        1e-3 * width * rows * columns / microseconds, 1
                    )
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.2, help="per measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", message=".*deprecated.*", category=UserWarning)
    load = os.getloadavg()[0]
    with torch.inference_mode():
        lines = list(results(arguments.seconds))
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "capability": torch.backends.cpu.get_cpu_capability(),
                "threads": arguments.threads,
                "load_before": round(load, 1),
                "results": lines,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
