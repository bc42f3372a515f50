"""A Llama from token ids to the last layer's outcome, in one parallel region.

At batch 1 a step reads each weight once and computes little; with an operator at a time the calls
between take longer than that, and every one of them finds its code pushed out of the cache by the
weights. Here the threads go through the layers together, with a barrier between the phases of a
layer. After the last layer's attention only the tokens whose logits are wanted go on. Products and
attention are kernels of their own, called by their addresses: compiled into this one too they would
take twice as long to compile.
"""

from __future__ import annotations

import ctypes
import itertools

import numba
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trioserve.kernels.cpu import (
    paged_attention,
    panel_product,
    silu,
    simd,
    whole_panels,
    whole_product,
)
from trioserve.kernels.cpu import rows as row_wise
from trioserve.kernels.cpu.paged_attention import PagedAttention
from trioserve.kernels.cpu.panel_product import (
    Panels,
    record_bytes,
    scratch_bytes,
    split_bytes,
)
from trioserve.kernels.cpu.runtime import (
    FASTMATH,
    Kernel,
    Team,
    aligned_bytes,
    call_kernel,
    team_barrier,
    team_size,
    thread_index,
)

COLUMNS = 512  # of the activation, one thread at a time
QKV, OUTPUT, GATE_UP, DOWN = range(4)  # a layer's products
OWN_FIELDS = 9  # the first of attention's parameters, up to ``values``: a layer's own

_FIELDS = (
    *("token_ids", "positions", "embedding", "embedding_half", "vocab"),
    *("rotations", "num_positions", "fault"),
    *("hidden", "normed", "heads", "mixed", "gate_up", "gated", "norms"),
    *("rows", "width", "mixed_width", "inner", "rotated_heads", "heads_stride", "head_dim"),
    *("kept", "num_kept", "kept_hidden", "kept_mixed"),
    *("layers", "linears", "attentions", "products", "attend"),
)


class Params(ctypes.Structure):
    """Addresses of float32 unless said otherwise. ``token_ids``, ``positions`` and ``kept``, the
    tokens that are wanted, are int64; ``kept`` is 0 where all are. ``embedding`` is float16 with
    ``embedding_half``; ``rotations`` float32 [num_positions, head_dim]. ``norms`` is int64
    [layers, 2] of addresses, ``linears`` and ``attentions`` hold [layers + 1, 4] and [layers] of
    the kernels' own parameters, the last four of ``linears`` for the tokens that are wanted.
    ``fault`` is set where an id or a position is in no table; ``attend`` is where that kernel is,
    ``products`` int64 [layers + 1, 4] where those of the products are."""

    _fields_ = [*((name, ctypes.c_int64) for name in _FIELDS), ("eps", ctypes.c_double)]


_LINEAR = np.dtype(panel_product.Params)
_ATTENTION = np.dtype(paged_attention.Params)
LINEAR_BYTES, ATTENTION_BYTES = _LINEAR.itemsize, _ATTENTION.itemsize


@frozen(kw_only=True)
class DecoderLayer:
    """One layer's weights. Biases may be None.

    norms float32 [width]; qkv [heads + 2 kv_heads, …], its q and k rows in rotary order (pairs
    adjacent); gate_up gate first.
    """

    attention_norm: Tensor
    qkv: Panels
    qkv_bias: Tensor | None
    output: Panels
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Panels
    gate_up_bias: Tensor | None
    down: Panels
    down_bias: Tensor | None


def reference(hidden, rotations, layers, ends, heads, eps, exact=False):
    """All layers in float64, without a cache: every row of tokens begins its sequence.

    Args:
        hidden: [n, width]. rotations: complex [n, 1, head_dim / 2].
        layers: dictionaries like DecoderLayer with plain weights [out, in].
        ends: first token of each row, then n.
        heads: query heads, KV heads, head_dim.
        exact: whether weights are used as they are, or rounded to float16.

    Returns: the last layer's outcome [n, width].
    """
    hidden = hidden.astype(np.float64)

    def norm(weight):
        scale = np.sqrt((hidden**2).mean(-1, keepdims=True) + eps)
        return hidden / scale * weight.numpy()

    def product(x, layer, name):
        bias = layer[f"{name}_bias"]
        bias = None if bias is None else bias.numpy()
        return panel_product.reference(x, layer[name].numpy(), bias, exact)

    q_heads, kv_heads, dim = heads
    for layer in layers:
        qkv = product(norm(layer["attention_norm"]), layer, "qkv").reshape(len(hidden), -1, dim)
        turned = (qkv[..., 0::2] + 1j * qkv[..., 1::2]) * rotations
        turned = np.stack([turned.real, turned.imag], -1).reshape(qkv.shape)
        query, key = turned[:, :q_heads], turned[:, q_heads : q_heads + kv_heads]
        value = qkv[:, q_heads + kv_heads :]
        mixed = np.concatenate(
            [
                paged_attention.reference(
                    query[first:last],
                    key[None, first:last].transpose(0, 2, 1, 3),
                    value[None, first:last].transpose(0, 2, 1, 3),
                    [0],
                    0,
                    dim**-0.5,
                ).reshape(last - first, -1)
                for first, last in itertools.pairwise(ends)
            ]
        )
        hidden = hidden + product(mixed, layer, "output")
        gate, up = np.split(product(norm(layer["mlp_norm"]), layer, "gate_up"), 2, -1)
        hidden = hidden + product(gate / (1 + np.exp(-gate)) * up, layer, "down")
    return hidden


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _embed(p, first, last):
    """hidden of tokens [first, last) from the embedding. ``fault`` says that an id or a position
    lies outside its table; the token counts as the first then."""
    token_ids = numba.carray(simd.int64s(p.token_ids), p.rows)
    positions = numba.carray(simd.int64s(p.positions), p.rows)
    for token in range(first, last):
        id = token_ids[token]
        if id < 0 or id >= p.vocab or positions[token] < 0 or positions[token] >= p.num_positions:
            p.fault = 1
            id = 0
        target = p.hidden + token * p.width * 4
        row_wise.embed(p.embedding, p.embedding_half, id, p.width, target)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _rotate(p, first, last):
    """Turn the q and k heads of tokens [first, last)."""
    positions = numba.carray(simd.int64s(p.positions), p.rows)
    for token in range(first, last):
        position = min(max(positions[token], 0), p.num_positions - 1)
        turn = p.rotations + position * p.head_dim * 4
        heads = p.heads + token * p.heads_stride * 4
        row_wise.rotate(heads, p.rotated_heads, p.head_dim, turn)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _keep(p, first, last):
    """Put the wanted tokens' rows, number [first, last) of them, together."""
    kept = numba.carray(simd.int64s(p.kept), p.num_kept)
    for row in range(first, last):
        token = kept[row]
        for source, target, width in (
            (p.hidden, p.kept_hidden, p.width),
            (p.mixed, p.kept_mixed, p.mixed_width),
        ):
            row_wise.copy(source + token * width * 4, target + row * width * 4, width)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _gate(p, rows, thread, threads):
    """gated = silu(gate) * up, in pieces of COLUMNS."""
    inner = p.inner
    pieces = (inner + COLUMNS - 1) // COLUMNS
    units = rows * pieces
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        row, column = unit // pieces, unit % pieces * COLUMNS
        gate = p.gate_up + (row * 2 * inner + column) * 4
        out = p.gated + (row * inner + column) * 4
        silu.silu_mul(gate, gate + inner * 4, out, min(COLUMNS, inner - column))


def decoder(params):
    """The kernel: one thread's way through all layers."""
    p = numba.carray(params, 1)[0]
    thread, threads = thread_index(), max(1, team_size())
    norms = numba.carray(simd.int64s(p.norms), (p.layers, 2))
    products = numba.carray(simd.int64s(p.products), (p.layers + 1, 4))
    rows, hidden = p.rows, p.hidden
    first, last = rows * thread // threads, rows * (thread + 1) // threads
    _embed(p, first, last)
    for layer in range(p.layers):
        place, lines = layer, p.linears + layer * 4 * LINEAR_BYTES
        row_wise.rms_norm(hidden, norms[layer, 0], p.eps, p.width, p.normed, first, last)
        team_barrier()
        call_kernel(products[place, QKV], lines + QKV * LINEAR_BYTES)
        team_barrier()
        _rotate(p, first, last)
        team_barrier()
        call_kernel(p.attend, p.attentions + layer * ATTENTION_BYTES)
        if layer == p.layers - 1:  # the cache is written; only tokens that are wanted matter now
            if p.num_kept == 0:
                break
            place, lines, rows = layer + 1, lines + 4 * LINEAR_BYTES, p.num_kept
            first, last = rows * thread // threads, rows * (thread + 1) // threads
            if p.kept != 0:
                hidden = p.kept_hidden
                team_barrier()
                _keep(p, first, last)
        team_barrier()
        call_kernel(products[place, OUTPUT], lines + OUTPUT * LINEAR_BYTES)
        team_barrier()
        row_wise.rms_norm(hidden, norms[layer, 1], p.eps, p.width, p.normed, first, last)
        team_barrier()
        call_kernel(products[place, GATE_UP], lines + GATE_UP * LINEAR_BYTES)
        team_barrier()
        _gate(p, rows, thread, threads)
        team_barrier()
        call_kernel(products[place, DOWN], lines + DOWN * LINEAR_BYTES)
        team_barrier()


@frozen(kw_only=True)
class DecoderKernels:
    """The kernel of the layers and those that it calls."""

    layers: Kernel
    product: Kernel
    attend: Kernel


def compile_decoder(team: Team) -> DecoderKernels:
    """The kernels, before there are weights. Raises what numba raises where it does not work."""
    return DecoderKernels(
        layers=team.compile(decoder, Params),
        product=team.compile(panel_product.panel_product, panel_product.Params),
        attend=team.compile(paged_attention.attend, paged_attention.Params),
    )


class Decoder:
    """Runs the layers of one model. Used by one thread.

    Args:
        team: runs the kernel.
        kernels: of ``compile_decoder``.
        embedding: float16 or float32 [vocab, width].
        layers: the weights.
        attention: prepared for each step before the call.
        eps: of the norms.
    """

    def __init__(
        self,
        team: Team,
        kernels: DecoderKernels,
        embedding: Tensor,
        layers: list[DecoderLayer],
        attention: PagedAttention,
        eps: float,
    ) -> None:
        self._kernel = kernels.layers
        self._called = kernels  # they own their machine code
        self._layers = layers
        self._attention = attention
        self._threads, self._exact, self._tiles = team.threads, team.exact, team.tiles
        self._whole_tiles = whole_product.tile_setup(team)
        self._byte_products, self._word_products = team.byte_products, team.word_products
        self._parts = team.parts
        self._params = p = Params()
        first = layers[0]
        q_heads = attention.kv_heads * attention.group
        self._width = first.attention_norm.shape[0]
        self._inner = first.down.inputs
        self._mixed_width = q_heads * attention.head_dim
        self._heads_width = self._mixed_width + 2 * attention.kv_heads * attention.head_dim
        p.width, p.inner, p.eps = self._width, self._inner, eps
        p.mixed_width = self._mixed_width
        self._embedding = embedding.contiguous()
        p.embedding, p.vocab = self._embedding.data_ptr(), len(embedding)
        p.embedding_half = embedding.dtype == torch.float16
        p.rotated_heads = q_heads + attention.kv_heads
        p.heads_stride, p.head_dim = self._heads_width, attention.head_dim
        p.layers = len(layers)
        p.attend = kernels.attend.address
        self._norms = np.array(
            [[layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()] for layer in layers],
            np.int64,
        )
        self._linears = np.zeros((len(layers) + 1, 4), _LINEAR)
        self._products = np.full((len(layers) + 1, 4), kernels.product.address)
        p.products = self._products.ctypes.data
        self._attentions = np.zeros(len(layers), _ATTENTION)
        # Each product and each layer's attention counts its units on cache lines of its own.
        self._counters = np.zeros((len(layers) + 1, 4 + 3, 8), np.int64)
        self._attention_counters = np.array(
            [line[4].ctypes.data for line in self._counters[:-1]], np.int64
        )
        self._attention_params = np.frombuffer(attention.params, np.int64)
        self._caches: list[tuple[Tensor, Tensor]] | None = None
        p.norms, p.linears = self._norms.ctypes.data, self._linears.ctypes.data
        p.attentions = self._attentions.ctypes.data
        self._set_weights(team)
        self._reserve(64)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rotations: Tensor,
        caches: list[tuple[Tensor, Tensor]],
        wanted: Tensor,
    ) -> Tensor:
        """Run all layers.

        Args:
            token_ids, positions: int64 [n], contiguous.
            rotations: complex64 [positions, head_dim / 2], contiguous: a table by position.
            caches: keys and values of each layer, made by ``attention.new_cache``.
            wanted: int64 [r], contiguous: the tokens whose outcome is wanted.

        Returns:
            float32 [r, width], the last layer's outcome; valid until the next call.

        Raises:
            IndexError: a token id or a position lies in no table; the cache is written even so.
            ValueError: another shape, type or layout, or rows other than were prepared.
        """
        p = self._params
        rows, num_kept = token_ids.shape[0], wanted.shape[0]
        self._check(token_ids, positions, rotations, caches, wanted)
        if max(rows, num_kept) > self._capacity:
            self._reserve(max(rows, num_kept))
        p.token_ids, p.positions, p.rows = token_ids.data_ptr(), positions.data_ptr(), rows
        p.rotations, p.num_positions = rotations.data_ptr(), rotations.shape[0]
        whole = num_kept == rows and bool((wanted.numpy() == self._numbers[:rows]).all())
        p.kept, p.num_kept, p.fault = 0 if whole else wanted.data_ptr(), num_kept, 0
        self._line_rows[:-1] = rows
        self._line_rows[-1] = num_kept
        last = self._linears[-1]
        last["x"][OUTPUT] = p.mixed if whole else p.kept_mixed
        last["out"][OUTPUT] = last["out"][DOWN] = p.hidden if whole else p.kept_hidden
        self._set_attention(caches)
        self._counters[:, :, 0] = 0
        self._kernel(p)
        if p.fault:
            raise IndexError("a token id or a position is out of range")
        return (self._hidden if whole else self._kept_hidden)[:num_kept]

    def _check(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rotations: Tensor,
        caches: list[tuple[Tensor, Tensor]],
        wanted: Tensor,
    ) -> None:
        rows, half = token_ids.shape[0], self._params.head_dim // 2
        for name, tensor, dtype, shape in (
            ("token_ids", token_ids, torch.int64, (rows,)),
            ("positions", positions, torch.int64, (rows,)),
            ("wanted", wanted, torch.int64, (wanted.shape[0],)),
            ("rotations", rotations, torch.complex64, (rotations.shape[0], half)),
        ):
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(f"{name} must be {dtype} {list(shape)}, contiguous")
        if rows != self._attention.params.num_tokens:
            raise ValueError(f"{self._attention.params.num_tokens} tokens prepared, {rows} came")
        if len(caches) != self._params.layers:
            raise ValueError(f"{self._params.layers} caches are needed, {len(caches)} came")

    def _set_weights(self, team: Team) -> None:
        for index, layer in enumerate([*self._layers, self._layers[-1]]):
            for which, packed, bias, outputs in (
                (QKV, layer.qkv, layer.qkv_bias, self._heads_width),
                (OUTPUT, layer.output, layer.output_bias, self._width),
                (GATE_UP, layer.gate_up, layer.gate_up_bias, 2 * self._inner),
                (DOWN, layer.down, layer.down_bias, self._width),
            ):
                line = self._linears[index, which]
                if packed.outputs != outputs:
                    raise ValueError(f"{packed.outputs} outputs where {outputs} belong")
                line["weight"], line["kind"] = packed.data.data_ptr(), packed.kind
                line["bias"] = 0 if bias is None else bias.data_ptr()
                line["inputs"] = line["x_stride"] = packed.inputs
                line["outputs"], line["panels"] = outputs, packed.count
                line["panels_per_unit"] = max(1, packed.count // (self._threads * 8))
                line["exact"], line["byte_products"] = self._exact, self._byte_products
                line["parts"], line["word_products"] = self._parts, self._word_products
                line["threads"], line["add"] = self._threads, which in (OUTPUT, DOWN)
                line["counter"] = self._counters[index, which].ctypes.data

        self._are_whole = np.isin(self._linears["kind"], whole_panels.KINDS)
        if self._are_whole.any():
            self._whole = team.compile(whole_product.whole_product, panel_product.Params)
            self._products[self._are_whole] = self._whole.address

    def _reserve(self, rows: int) -> None:
        """Make the buffers between the phases."""
        self._capacity = rows
        self._numbers = np.arange(rows)
        self._hidden = torch.zeros(rows, self._width)
        self._kept_hidden = torch.zeros(rows, self._width)
        self._kept_mixed = torch.zeros(rows, self._mixed_width)
        self._normed = torch.zeros(rows, self._width)
        self._heads = torch.zeros(rows, self._heads_width)
        self._mixed = torch.zeros(rows, self._mixed_width)
        self._gate_up = torch.zeros(rows, 2 * self._inner)
        self._gated = torch.zeros(rows, self._inner)
        most = max(self._width, self._inner, self._mixed_width)
        stride = scratch_bytes(rows, most)
        self._scratch = aligned_bytes(self._threads * stride)
        linears = self._linears
        linears["scratch"], linears["scratch_stride"] = self._scratch.ctypes.data, stride
        self._records = aligned_bytes(record_bytes(rows, most))
        linears["records"] = self._records.ctypes.data
        if self._tiles is not None:
            self._split = aligned_bytes(split_bytes(rows, most))
            linears["split"], linears["tiles"] = self._split.ctypes.data, self._tiles.ctypes.data
        if self._are_whole.any():
            self._reserve_whole(rows, most)
        for which, source in (
            (QKV, self._normed),
            (OUTPUT, self._mixed),
            (GATE_UP, self._normed),
            (DOWN, self._gated),
        ):
            linears["x"][:, which] = source.data_ptr()
        linears["out"][:, QKV] = self._heads.data_ptr()
        linears["out"][:, GATE_UP] = self._gate_up.data_ptr()
        linears["out"][:, OUTPUT] = linears["out"][:, DOWN] = self._hidden.data_ptr()
        self._line_rows = linears["rows"]
        p = self._params
        p.hidden, p.mixed = self._hidden.data_ptr(), self._mixed.data_ptr()
        p.kept_hidden, p.kept_mixed = self._kept_hidden.data_ptr(), self._kept_mixed.data_ptr()
        p.normed, p.heads = self._normed.data_ptr(), self._heads.data_ptr()
        p.gate_up, p.gated = self._gate_up.data_ptr(), self._gated.data_ptr()
        lines, heads = self._attentions, p.heads
        dim = p.head_dim
        lines["query"], lines["out"] = heads, self._mixed.data_ptr()
        lines["key"] = heads + self._mixed_width * 4
        lines["value"] = heads + (self._mixed_width + self._attention.kv_heads * dim) * 4
        for name in ("query_stride", "key_stride", "value_stride"):
            lines[name] = self._heads_width

    def _reserve_whole(self, rows: int, inputs: int) -> None:
        """What products in whole numbers have in place of the others' buffers."""
        setup, stride = self._whole_tiles, whole_product.scratch_bytes(rows)
        self._whole_scratch = aligned_bytes(self._threads * stride)
        self._integers = aligned_bytes(whole_product.split_bytes(rows, inputs))
        linears, are_whole = self._linears, self._are_whole
        linears["scratch"][are_whole] = self._whole_scratch.ctypes.data
        linears["scratch_stride"][are_whole] = stride
        linears["split"][are_whole] = self._integers.ctypes.data
        linears["tiles"][are_whole] = 0 if setup is None else setup.ctypes.data

    def _set_attention(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Give every layer the step's rows, and its own cache."""
        table = self._attentions.view(np.int64).reshape(len(self._attentions), -1)
        if caches is not self._caches:  # the same for every step: to look at each takes longer
            self._caches = caches
            self._attentions["keys"] = [keys.data_ptr() for keys, _ in caches]
            self._attentions["values"] = [values.data_ptr() for _, values in caches]
        table[:, OWN_FIELDS:] = self._attention_params[OWN_FIELDS:]
        self._attentions["counters"] = self._attention_counters
