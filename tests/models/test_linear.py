"""Weight layouts: the product, what they keep, and when one is passed over."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import pytest
import torch

from trioserve.errors import ModelError
from trioserve.models.linear import Fp32Linear, PackedFp16Linear, choose_layout, make_linear


def random_matrix(rows: int = 48, columns: int = 40) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.empty(rows, columns).normal_(0, 0.1, generator=source)


@pytest.mark.parametrize("layout", ["fp32", "fp16"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("n", [1, 3, 64])
def test_product(layout, with_bias, n):
    weight, x = random_matrix(), random_matrix(n)
    bias = torch.linspace(-1, 1, 48) if with_bias else None
    linear = make_linear(weight, bias, layout, "w")
    stored = weight if layout == "fp32" else weight.half()
    expected = x.double() @ stored.double().T + (0 if bias is None else bias)
    found = linear(x)
    assert found.dtype == torch.float32
    assert linear.layout == layout
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_packed_sums_are_float32():
    """2048 + 1 is lost in half precision."""
    linear = make_linear(torch.ones(1, 8), None, "fp16", "w")
    assert linear(torch.tensor([[2048.0, 1, 1, 1, 1, 1, 1, 1]])).item() == 2055.0


def test_activations_beyond_half_precision():
    linear = make_linear(torch.ones(1, 2), None, "fp16", "w")
    assert linear(torch.tensor([[1e6, 1e-9]])).item() == pytest.approx(1e6)


@pytest.mark.parametrize("value", [65505.0, -7e4, float("inf"), float("nan")])
def test_overflow_keeps_the_matrix_in_float32_and_says_so(value, caplog):
    weight = random_matrix()
    weight[3, 5] = value
    with caplog.at_level(logging.WARNING):
        linear = make_linear(weight, None, "fp16", "layers.7.down")
    assert isinstance(linear, Fp32Linear)
    assert "layers.7.down" in caplog.text


def test_largest_half_precision_value_is_packed(caplog):
    weight = random_matrix()
    weight[0, 0] = 65504.0
    assert isinstance(make_linear(weight, None, "fp16", "w"), PackedFp16Linear)
    assert not caplog.records


def test_bytes():
    weight, bias = random_matrix(), torch.zeros(48)
    assert make_linear(weight, bias, "fp32", "w").num_bytes == 48 * 40 * 4 + 48 * 4
    assert make_linear(weight, bias, "fp16", "w").num_bytes == 48 * 512 * 2 + 48 * 4


@pytest.mark.parametrize(("columns", "stored"), [(512, 512), (513, 1024)])
def test_packed_bytes_are_what_the_process_grows_by(columns, stored):
    trim = ctypes.CDLL(None).malloc_trim
    weight = torch.zeros(32768, columns)
    trim(0)
    before = resident_bytes()
    linear = PackedFp16Linear(weight)
    trim(0)
    grown = resident_bytes() - before
    assert linear.num_bytes == 32768 * stored * 2
    assert grown == pytest.approx(linear.num_bytes, rel=0.1)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_layout_as_configured():
    assert choose_layout("fp32")[0] == "fp32"
    assert choose_layout("fp16")[0] == "fp16"
    assert choose_layout("auto")[0] == "fp16"


def test_processor_without_the_kernels(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    layout, reason = choose_layout("auto")
    assert layout == "fp32"
    assert "AVX2" in reason
    with pytest.raises(ModelError, match=r"weights = fp16 .*AVX2.*set it to fp32 or auto"):
        choose_layout("fp16")


def test_torch_without_the_kernels(monkeypatch):
    def refuse(weight, bias):
        raise RuntimeError("Didn't find engine\nand a long trace")

    monkeypatch.setattr(torch.ops.quantized, "linear_prepack_fp16", refuse)
    layout, reason = choose_layout("auto")
    assert layout == "fp32"
    assert "Didn't find engine" in reason
    assert "\n" not in reason
