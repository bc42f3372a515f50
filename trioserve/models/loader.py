"""Reads a checkpoint's tensors, each when it is asked for.

Files are read, not mapped: a file cut short while it is read is then an error and not a signal,
and no mapped page counts as this process's memory. Random models are made here too.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from trioserve.errors import ModelError
from trioserve.kernels.cpu.codes import Blocks
from trioserve.models.gguf_dequant import BLOCK_BYTES, CODE_BITS, dequantize, read_codes
from trioserve.models.gguf_names import hf_name
from trioserve.models.spec import ResolvedModel, TensorInfo

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RANDOM_STD = 0.02


@contextmanager
def open_weights(
    model: ResolvedModel,
    expected: Mapping[str, tuple[int, ...]],
) -> Iterator[ModelTensors]:
    """Open a model's weights as a mapping from Hugging Face name to a new float32 tensor.

    Every lookup reads the tensor anew and keeps nothing of it; several threads may look up at
    once. The files are closed on leaving.

    Args:
        model: format "safetensors", "gguf" or "random".
        expected: name to shape of what will be read; a random model is made of these.

    Raises:
        ModelError: a file cannot be opened; on lookup, a tensor cannot be read.
    """
    if model.format == "random":
        yield RandomTensors(expected, model.seed)
        return
    with ExitStack() as files:
        descriptors: dict[str, int] = {}
        for path in {tensor.path for tensor in model.tensors}:
            descriptors[path] = _open(path)
            files.callback(os.close, descriptors[path])
        yield FileTensors(model, descriptors, expected)


class ModelTensors(Mapping[str, Tensor]):
    """Tensors by name, each made when it is looked up; counts the bytes of those made.

    Attributes:
        total_bytes: of the tensors that the model will look up.
    """

    total_bytes: int

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._done_bytes = 0

    @property
    def progress(self) -> tuple[float, int]:
        """Fraction of ``total_bytes``, and bytes, looked up so far."""
        return min(1.0, self._done_bytes / self.total_bytes), self._done_bytes

    def code_bits(self, name: str) -> int | None:
        """Bits of the codes that the tensor is stored as; None if it has no codes to be kept."""
        return None

    def codes(self, name: str) -> Blocks:
        """The tensor as its file has it; for those with ``code_bits``."""
        raise KeyError(name)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class FileTensors(ModelTensors):
    """The tensors of a safetensors or GGUF checkpoint. Made by ``open_weights``."""

    def __init__(
        self, model: ResolvedModel, descriptors: Mapping[str, int], expected: Container[str]
    ) -> None:
        self._infos = {
            (hf_name(info.name) or info.name) if model.format == "gguf" else info.name: info
            for info in model.tensors
        }
        super().__init__(self._infos)
        self.total_bytes = sum(
            info.num_bytes for name, info in self._infos.items() if name in expected
        )
        self._permuted = model.format == "gguf" and model.spec.architecture == "llama"
        self._head_dim = model.spec.head_dim
        self._descriptors = descriptors

    def __getitem__(self, name: str) -> Tensor:
        info = self._infos[name]
        tensor = to_float32(_read(self._descriptors[info.path], info), info)
        if self._permuted and (".q_proj." in name or ".k_proj." in name):
            tensor = undo_permutation(tensor, self._head_dim)
        self._count(info.num_bytes)
        return tensor

    def code_bits(self, name: str) -> int | None:
        info = self._infos.get(name)
        return CODE_BITS.get(info.dtype) if info is not None and len(info.shape) == 2 else None

    def codes(self, name: str) -> Blocks:
        info = self._infos[name]
        raw = _read(self._descriptors[info.path], info)
        try:
            blocks = read_codes(raw, info.dtype, info.shape)
        except RuntimeError:
            raise _damaged(info) from None
        if self._permuted and (".q_proj." in name or ".k_proj." in name):
            numbers = torch.arange(info.shape[0]).unsqueeze(1)
            blocks = blocks.rows(undo_permutation(numbers, self._head_dim).flatten())
        self._count(info.num_bytes)
        return blocks


class RandomTensors(ModelTensors):
    """Tensors drawn from a seed: norms are ones, biases zeros, the rest normal with deviation 0.02.

    A tensor depends on the seed and its own name only, not on what was drawn before it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        super().__init__(shapes)
        self.total_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
        self._shapes = shapes
        self._seed = seed

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif len(shape) == 1:
            tensor = torch.ones(shape)
        else:
            source = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
            tensor = torch.empty(shape).normal_(0.0, RANDOM_STD, generator=source)
        self._count(tensor.nbytes)
        return tensor


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
        raise _damaged(info) from None
    supported = ", ".join((*PLAIN_TYPES, *BLOCK_BYTES))
    raise ModelError(
        f"{info.path}: tensor {info.name} is stored as {info.dtype}; supported: {supported}"
    )


def _damaged(info: TensorInfo) -> ModelError:
    return ModelError(
        f"{info.path}: tensor {info.name}: {info.num_bytes} bytes of {info.dtype} do not make "
        f"the shape {list(info.shape)}; the file is damaged"
    )


def undo_permutation(tensor: Tensor, head_dim: int) -> Tensor:
    """Bring the rows of a GGUF tensor, weight or bias, into the order of Hugging Face checkpoints.

    llama.cpp's converter puts the pairs that rotary turns side by side in the q and k projections
    of the llama architecture, 2i and 2i + 1; the original pairs i with i + head_dim / 2.
    """
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
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
