"""Headers of GGUF files, version 2 and 3: metadata, tensor table, and whether the file is whole.

The format, little-endian: magic, version, number of tensors, number of key-values; the key-values;
the tensor table, its offsets counted from the first multiple of the alignment after it; the data.
Strings are a 64-bit length and UTF-8. Arrays stay in the file until they are asked for: a
vocabulary is most of a header, and most readers want a few numbers.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import field, frozen

from trioserve.errors import ModelError
from trioserve.models.files import POINTER, read_error, refuse_pointer
from trioserve.models.spec import TensorInfo

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
MAX_COUNT = 1 << 24  # of tensors and of keys: far above any real file, far below harm
MAX_DIMENSIONS = 4
# name, elements per block, bytes per block
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
# Those that are not read, so that the error can name them.
OTHER_TENSOR_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@frozen(eq=False)
class GGUFArray:
    """An array value, read from the file each time it is iterated; the file stays mapped."""

    kind: int
    length: int
    _data: mmap.mmap = field(repr=False)
    _start: int = field(repr=False)
    _path: Path = field(repr=False)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """The items: numbers, texts (undecodable bytes replaced) or nested arrays."""
        if self.kind in SCALARS:
            code = SCALARS[self.kind]
            yield from struct.unpack_from(f"<{self.length}{code}", self._data, self._start)
            return
        cursor = _Cursor(self._data, self._path, self._start)
        for _ in range(self.length):
            yield cursor.value(self.kind)

    def at(self, index: int) -> Any:
        """The item at ``index``; None where there is none. Walks the strings before it."""
        if not 0 <= index < self.length:
            return None
        if self.kind in SCALARS:
            code = SCALARS[self.kind]
            offset = self._start + index * struct.calcsize(f"<{code}")
            return struct.unpack_from(f"<{code}", self._data, offset)[0]
        cursor = _Cursor(self._data, self._path, self._start)
        for _ in range(index):
            cursor.skip(self.kind)
        return cursor.value(self.kind)


@frozen
class GGUFHeader:
    """What a GGUF file says of itself. ``spans`` are the bytes of each key-value in the file."""

    path: Path
    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    spans: dict[str, tuple[int, int]] = field(repr=False)
    _data: mmap.mmap = field(repr=False)

    def digest(self, prefix: str) -> str:
        """SHA-256, as hexadecimal text, of all key-values whose key starts with ``prefix``."""
        digest = hashlib.sha256()
        for key in sorted(self.spans):
            if key.startswith(prefix):
                begin, end = self.spans[key]
                digest.update(self._data[begin:end])
        return digest.hexdigest()

    def floats(self, tensor: TensorInfo) -> tuple[float, ...]:
        """The values of a small F32 tensor."""
        count = math.prod(tensor.shape)
        return struct.unpack_from(f"<{count}f", self._data, tensor.offset)


def read_header(path: Path) -> GGUFHeader:
    """Parse a file's header. Touches the header's pages only; the data is compared by size.

    Raises:
        ModelError: it cannot be read, is truncated or damaged, is a part of a split model, is
            big-endian, or has a tensor type that is not supported.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(POINTER))
            refuse_pointer(path, start)
            if start[:4] != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise read_error(path, error) from error
    cursor = _Cursor(data, path, 4)
    version = cursor.scalar("I")
    _check_version(path, version)
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if max(num_tensors, num_keys) > MAX_COUNT:
        raise ModelError(
            f"{path} is damaged: it claims {num_tensors} tensors and {num_keys} metadata keys"
        )
    try:
        metadata, spans = _read_metadata(cursor, num_keys)
    except RecursionError as error:
        raise ModelError(f"{path} is damaged: metadata arrays nested too deeply") from error
    _refuse_split(path, metadata)
    tensors = _read_tensors(cursor, num_tensors, metadata)
    return GGUFHeader(path, version, metadata, tensors, spans, data)


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    if version & 0xFFFF == 0:  # the number's bytes are at the other end
        raise ModelError(f"{path} is a big-endian GGUF file; only little-endian ones are read")
    raise ModelError(f"{path} has GGUF version {version}, supported: 2, 3")


def _refuse_split(path: Path, metadata: dict[str, Any]) -> None:
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise ModelError(
            f"{path} is one of {count} parts of a split GGUF; join them with "
            "`llama-gguf-split --merge` first"
        )


def _read_metadata(
    cursor: _Cursor, num_keys: int
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(num_keys):
        begin = cursor.offset
        key = cursor.text()
        if key in metadata:
            raise ModelError(f"{cursor.path} is damaged: metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
        spans[key] = (begin, cursor.offset)
    return metadata, spans


def _read_tensors(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]
) -> tuple[TensorInfo, ...]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{cursor.path}: general.alignment is {alignment}, no power of two")
    table = [_tensor_entry(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = []
    end = 0
    for name, shape, kind, offset in table:
        dtype, num_bytes = _storage(cursor.path, name, shape, kind)
        if offset % alignment:
            raise ModelError(f"{cursor.path}: tensor {name} is not aligned to {alignment} bytes")
        tensors.append(
            TensorInfo(
                name=name,
                path=str(cursor.path),
                dtype=dtype,
                shape=shape,
                offset=data_start + offset,
                num_bytes=num_bytes,
            )
        )
        end = max(end, data_start + offset + num_bytes)
    _check_tensors(cursor, tensors, end)
    return tuple(tensors)


def _check_tensors(cursor: _Cursor, tensors: list[TensorInfo], end: int) -> None:
    """No name twice, no byte in two tensors, and all of them inside the file."""
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelError(f"{cursor.path} is damaged: a tensor name appears twice")
    last = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset < last:
            raise ModelError(f"{cursor.path}: tensor {tensor.name} overlaps the one before")
        last = tensor.offset + tensor.num_bytes
    if end > len(cursor.data):
        raise ModelError(
            f"{cursor.path} is truncated: {len(cursor.data)} bytes, its tensors end at {end}"
        )


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape with the outermost dimension first, type number, offset."""
    name = cursor.text()
    num_dimensions = cursor.scalar("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path} is damaged: tensor {name} of {num_dimensions} dimensions")
    # The file has the innermost dimension first.
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _storage(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """The type's name and the bytes of a tensor of that type and shape."""
    if kind not in TENSOR_TYPES:
        supported = ", ".join(dtype for dtype, _, _ in TENSOR_TYPES.values())
        called = OTHER_TENSOR_TYPES.get(kind, f"number {kind}")
        raise ModelError(
            f"{path}: tensor {name} has type {called}, unsupported; supported: {supported}"
        )
    dtype, block_elements, block_bytes = TENSOR_TYPES[kind]
    row = shape[-1] if shape else 1
    if row % block_elements:
        raise ModelError(
            f"{path}: tensor {name} of type {dtype} has rows of {row}, no multiple of "
            f"{block_elements}"
        )
    return dtype, math.prod(shape) // block_elements * block_bytes


class _Cursor:
    """A place in the mapped header, moving on. Every read is held to the file's end."""

    def __init__(self, data: mmap.mmap, path: Path, offset: int) -> None:
        self.data = data
        self.path = path
        self.offset = offset

    def _take(self, num_bytes: int) -> int:
        """Move over ``num_bytes`` and return where they begin."""
        begin = self.offset
        if begin + num_bytes > len(self.data):
            raise ModelError(
                f"{self.path} is truncated: {len(self.data)} bytes, its header reads to "
                f"{begin + num_bytes}"
            )
        self.offset = begin + num_bytes
        return begin

    def scalar(self, code: str) -> Any:
        """One number of struct's type ``code``."""
        return struct.unpack_from(f"<{code}", self.data, self._take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """One string; bytes that are not UTF-8 are replaced."""
        length = self.scalar("Q")
        begin = self._take(length)
        return self.data[begin : begin + length].decode(errors="replace")

    def value(self, kind: int) -> Any:
        """One value: a number, a text, or a ``GGUFArray`` over what it moved past."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            item_kind, length = self.scalar("I"), self.scalar("Q")
            begin = self.offset
            self._skip_items(item_kind, length)
            return GGUFArray(item_kind, length, self.data, begin, self.path)
        return self.scalar(self._code(kind))

    def skip(self, kind: int) -> None:
        """Move over one value."""
        if kind == STRING:
            self._take(self.scalar("Q"))
        elif kind == ARRAY:
            item_kind, length = self.scalar("I"), self.scalar("Q")
            self._skip_items(item_kind, length)
        else:
            self._take(struct.calcsize(f"<{self._code(kind)}"))

    def _skip_items(self, kind: int, length: int) -> None:
        if kind == STRING:
            self._skip_strings(length)
        elif kind == ARRAY:
            for _ in range(length):
                self.skip(kind)
        else:
            self._take(length * struct.calcsize(f"<{self._code(kind)}"))

    def _skip_strings(self, count: int) -> None:
        # The hot loop of a header: a vocabulary and its merges are a hundred thousand strings.
        offset, data, end = self.offset, self.data, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if offset + 8 > end:
                break
            offset += 8 + unpack(data, offset)[0]
            if offset > end:
                break
        else:
            self.offset = offset
            return
        self.offset = offset
        self._take(8)

    def _code(self, kind: int) -> str:
        code = SCALARS.get(kind)
        if code is None:
            raise ModelError(f"{self.path} is damaged: value type {kind} at byte {self.offset}")
        return code
