"""Reads a checkpoint's tensors, each when it is asked for.

Files are read, not mapped: a file cut short while it is read is then an error and not a signal,
and no mapped page counts as this process's memory. Random models are made here too.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from trioserve.errors import ModelError
from trioserve.models.gguf_dequant import BLOCK_BYTES, dequantize
from trioserve.models.spec import ModelSpec, ResolvedModel, TensorInfo

Progress = Callable[[float, int], None]  # fraction of the bytes, bytes read so far
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RANDOM_STD = 0.02


@contextmanager
def open_weights(
    model: ResolvedModel,
    expected: Mapping[str, tuple[int, ...]],
    progress: Progress | None = None,
) -> Iterator[Mapping[str, Tensor]]:
    """Open a model's weights as a mapping from Hugging Face name to a new float32 tensor.

    Every lookup reads the tensor anew and keeps nothing of it. The files are closed on leaving.

    Args:
        model: format "safetensors", "gguf" or "random".
        expected: name to shape of what will be read; a random model is made of these.
        progress: called after each tensor with the fraction and number of bytes read.

    Raises:
        ModelError: a file cannot be opened; on lookup, a tensor cannot be read.
    """
    report = progress or (lambda fraction, num_bytes: None)
    if model.format == "random":
        yield RandomWeights(expected, model.seed, report)
        return
    with ExitStack() as files:
        descriptors: dict[str, int] = {}
        for path in {tensor.path for tensor in model.tensors}:
            descriptors[path] = _open(path)
            files.callback(os.close, descriptors[path])
        yield FileWeights(model, descriptors, expected, report)


class FileWeights(Mapping[str, Tensor]):
    """The tensors of a safetensors or GGUF checkpoint. Made by ``open_weights``."""

    def __init__(
        self,
        model: ResolvedModel,
        descriptors: Mapping[str, int],
        expected: Container[str],
        report: Progress,
    ) -> None:
        self._infos = {
            _hf_name(info.name) if model.format == "gguf" else info.name: info
            for info in model.tensors
        }
        self._gguf = model.format == "gguf"
        self._spec = model.spec
        self._descriptors = descriptors
        self._report = report
        self._total_bytes = sum(
            info.num_bytes for name, info in self._infos.items() if name in expected
        )
        self._read_bytes = 0

    def __getitem__(self, name: str) -> Tensor:
        info = self._infos[name]
        tensor = to_float32(_read(self._descriptors[info.path], info), info)
        if self._gguf:
            tensor = undo_permutation(tensor, name, self._spec)
        self._read_bytes += info.num_bytes
        self._report(min(1.0, self._read_bytes / self._total_bytes), self._read_bytes)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


class RandomWeights(Mapping[str, Tensor]):
    """Tensors drawn from a seed: norms are ones, biases zeros, the rest normal with deviation 0.02.

    A tensor depends on the seed and its own name only, not on what was drawn before it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, report: Progress) -> None:
        self._shapes = shapes
        self._seed = seed
        self._report = report
        self._total_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
        self._made_bytes = 0

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif len(shape) == 1:
            tensor = torch.ones(shape)
        else:
            source = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
            tensor = torch.empty(shape).normal_(0.0, RANDOM_STD, generator=source)
        self._made_bytes += tensor.nbytes
        self._report(min(1.0, self._made_bytes / self._total_bytes), self._made_bytes)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def to_float32(raw: Tensor, info: TensorInfo) -> Tensor:
    """The stored bytes, uint8 ``[num_bytes]``, as float32 in the tensor's shape.

    Raises:
        ModelError: the storage type is not supported, or does not fit shape and bytes.
    """
    try:
        if info.dtype in BLOCK_BYTES:
            return dequantize(raw, info.dtype).view(info.shape)
        if info.dtype in PLAIN_TYPES:
            return raw.view(PLAIN_TYPES[info.dtype]).float().view(info.shape)
    except RuntimeError:
        raise ModelError(
            f"{info.path}: tensor {info.name}: {info.num_bytes} bytes of {info.dtype} do not make "
            f"the shape {list(info.shape)}; the file is damaged"
        ) from None
    supported = ", ".join((*PLAIN_TYPES, *BLOCK_BYTES))
    raise ModelError(
        f"{info.path}: tensor {info.name} is stored as {info.dtype}; supported: {supported}"
    )


def undo_permutation(tensor: Tensor, name: str, spec: ModelSpec) -> Tensor:
    """Bring a GGUF tensor's rows into the order of Hugging Face checkpoints.

    llama.cpp's converter puts the pairs that rotary turns side by side in the q and k projections
    of the llama architecture, 2i and 2i + 1; the original pairs i with i + head_dim / 2.
    """
    if spec.architecture != "llama" or (".q_proj." not in name and ".k_proj." not in name):
        return tensor
    pairs = tensor.unflatten(0, (-1, spec.head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"cannot open {path}: {error.strerror}") from error


def _read(descriptor: int, info: TensorInfo) -> Tensor:
    """Exactly the tensor's bytes, or ModelError."""
    raw = torch.empty(info.num_bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy())
    done = 0
    while done < info.num_bytes:
        try:
            count = os.preadv(descriptor, [view[done:]], info.offset + done)
        except OSError as error:
            raise ModelError(f"cannot read {info.path}: {error.strerror}") from error
        if count == 0:
            raise ModelError(
                f"{info.path} ends in the middle of tensor {info.name}; fetch the file again"
            )
        done += count
    return raw


def _hf_name(name: str) -> str:
    """blk.0.attn_q.weight → model.layers.0.self_attn.q_proj.weight; unknown names stay."""
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    inner = {
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
    if name in outer:
        return outer[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    if block != "blk" or part not in inner:
        return name
    return f"model.layers.{layer}.{inner[part]}.{kind}"
