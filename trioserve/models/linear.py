"""The one interface of all projections, and the weight layouts behind it.

A ``Linear`` computes ``x @ weight.T + bias`` in float32; how the weight lies in memory is the
layout's affair:

* ``fp32``: the plain matrix, torch's own product.
* ``fp16``: FBGEMM's packed half-precision matrix with float32 activations and sums. Half the bytes
  to read at batch 1, and blocked for the cache. Nothing is computed in half precision.
* ``panels``: the same float16 values in the order of this project's own kernels, which can run all
  layers in one go; see ``trioserve.models.panels``. The ModelRunner takes it where numba works.
* ``int8``: panels of 8-bit codes, 32 inputs to a float16 scale.
* ``packed``: panels of the 4- and 8-bit codes that a GGUF file holds, nothing rounded; what the
  file holds in other types is as in ``panels``.
* ``int8-dynamic``, ``int16-dynamic``: whole numbers with a scale for each output, multiplied with
  rows that become whole numbers of 16 bits with a scale each, see
  ``trioserve.kernels.cpu.whole_product``. Of 8 bits are those matrices that bear it: ``robust``
  ones, but for those that it would change by more than MOST_ERROR. All others have 16.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trioserve.errors import ModelError
from trioserve.kernels.cpu.codes import BLOCK, Blocks, quantize_q8
from trioserve.models.gguf_dequant import CODE_BITS
from trioserve.models.spec import ResolvedModel

log = logging.getLogger(__name__)

Layout = Literal["fp32", "fp16", "panels", "int8", "packed", "int8-dynamic", "int16-dynamic"]
DYNAMIC: tuple[Layout, ...] = ("int8-dynamic", "int16-dynamic")
MOST_ERROR = 0.01  # of a matrix that 8 bits may stand for, against its own size
FP16_MAX = 65504.0
PACKED_COLUMNS = 512  # FBGEMM stores whole blocks of so many columns; the product skips the padding


class Linear(Protocol):
    """A projection: float32 ``[n, in_features]`` to a new float32 ``[n, out_features]``.

    Attributes:
        layout: how the weight is stored.
        num_bytes: memory of weight and bias, padding included.
    """

    in_features: int
    out_features: int
    layout: Layout
    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class Fp32Linear:
    """A plain float32 matrix ``[out_features, in_features]``."""

    layout: Layout = "fp32"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + _nbytes(bias)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedFp16Linear:
    """A matrix rounded to float16 and packed by FBGEMM. The given weight is not kept.

    Of torch's two entry points this is the one that runs on all threads and is not deprecated;
    ``bench/linear.py`` compares them.
    """

    layout: Layout = "fp16"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        stored_columns = -(-self.in_features // PACKED_COLUMNS) * PACKED_COLUMNS
        self.num_bytes = self.out_features * stored_columns * 2 + _nbytes(bias)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        # The overload itself: resolving it anew costs microseconds at every call.
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._packed)


def make_linear(
    weight: Tensor | Blocks,
    bias: Tensor | None,
    layout: Layout,
    name: str,
    *,
    robust: bool = False,
) -> Linear:
    """Put a matrix ``[out, in]``, float32 or as codes (and bias ``[out]``), into a layout.

    Args:
        robust: whether the model bears it well when this one is rounded.

    A matrix with values beyond float16's range stays float32; the log says which one (``name``).
    """
    if isinstance(weight, Blocks):
        return _in_panels(weight, bias)
    if layout != "fp32":
        if fits_fp16(weight):
            if layout in DYNAMIC and weight.shape[1] % BLOCK == 0:
                return _whole(weight, bias, name, narrow=robust and layout == "int8-dynamic")
            return _narrow(weight, bias, layout)
        log.warning("%s has values beyond float16 and stays float32", name)
    return Fp32Linear(weight, bias)


def _narrow(weight: Tensor, bias: Tensor | None, layout: Layout) -> Linear:
    if layout == "fp16":
        return PackedFp16Linear(weight, bias)
    if layout == "int8" and weight.shape[1] % BLOCK == 0:
        return _in_panels(quantize_q8(weight), bias)
    return _in_panels(weight, bias)


def _in_panels(weight: Tensor | Blocks, bias: Tensor | None) -> Linear:
    from trioserve.models.panels import PanelLinear  # needs numba, which others do without

    return PanelLinear(weight, bias)


def _whole(weight: Tensor, bias: Tensor | None, name: str, narrow: bool) -> Linear:
    from trioserve.kernels.cpu.whole_panels import WHOLE8, WHOLE16, rounding_error
    from trioserve.models.panels import PanelLinear

    if narrow and (error := rounding_error(weight, WHOLE8)) > MOST_ERROR:
        log.info("%s keeps 16 bits: 8 would change it by %.1f %%", name, 100 * error)
        narrow = False
    return PanelLinear(weight, bias, WHOLE8 if narrow else WHOLE16)


def fits_fp16(weight: Tensor) -> bool:
    """Whether every finite value stays finite in float16. NaN and infinities do not fit."""
    low, high = torch.aminmax(weight)
    return bool(low >= -FP16_MAX) and bool(high <= FP16_MAX)


Wanted = Literal["auto", "fp32", "fp16", "int8", "packed", "int8-dynamic", "int16-dynamic"]


def choose_panels(wanted: Wanted, model: ResolvedModel) -> tuple[Layout, str]:
    """Decide ``[model] weights`` where this project's kernels work, and fp32 is not wanted.

    Returns:
        the layout, and the reason for people to read.

    Raises:
        ModelError: packed was asked for and the checkpoint holds no codes; whole numbers, and the
            processor does not multiply bytes.
    """
    if wanted == "int8":
        return "int8", "as configured"
    if wanted in DYNAMIC:
        from trioserve.kernels.cpu import whole_product

        if not whole_product.PRESENT:
            raise ModelError(
                f"[model] weights = {wanted} cannot be used: it needs a processor with AVX-512 "
                "VNNI; set it to int8, fp16 or auto"
            )
        return wanted, "as configured"
    has_codes = any(tensor.dtype in CODE_BITS for tensor in model.tensors)
    if wanted == "packed" and not has_codes:
        raise ModelError(
            f"[model] weights = packed cannot be used: {model.source} holds no 4- or 8-bit codes; "
            "set it to int8, fp16 or auto"
        )
    if wanted == "packed" or (wanted == "auto" and has_codes):
        return "packed", "the codes of the file, the layers run as one kernel"
    return "panels", "float16, the layers run as one kernel"


def choose_layout(wanted: Wanted) -> tuple[Layout, str]:
    """Decide ``[model] weights`` where this project's kernels do not work, or fp32 is wanted.

    Returns:
        the layout, and the reason for people to read.

    Raises:
        ModelError: what was asked for needs kernels that this processor or torch build lacks.
    """
    if wanted == "fp32":
        return "fp32", "as configured"
    if wanted in ("int8", "packed", *DYNAMIC):
        raise ModelError(
            f"[model] weights = {wanted} cannot be used: it needs the kernels that numba compiles, "
            "which do not work here (the log says why); set it to fp16, fp32 or auto"
        )
    missing = _why_no_packed_fp16()
    if missing is None:
        return "fp16", "as configured" if wanted == "fp16" else "packed kernels are available"
    if wanted == "fp16":
        raise ModelError(
            f"[model] weights = fp16 cannot be used: {missing}; set it to fp32 or auto"
        )
    return "fp32", missing


def _why_no_packed_fp16() -> str | None:
    """None where packed float16 products work, else what is missing."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        return f"packed float16 products need AVX2, torch found {capability}"
    try:
        PackedFp16Linear(torch.zeros(8, 8))(torch.zeros(1, 8))
    except (RuntimeError, AttributeError) as error:
        return f"this torch build has no packed float16 products ({str(error).splitlines()[0]})"
    return None


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
