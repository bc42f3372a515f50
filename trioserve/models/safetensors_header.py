"""Headers of safetensors files: which tensors lie where, and whether the file is whole.

The format: 8 bytes, little-endian, the length of a JSON object; the object, one entry per tensor
with dtype, shape and data_offsets (counted from the end of the object); the data, without holes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

from trioserve.errors import ModelError
from trioserve.models.files import POINTER, pickle_refused, read_error, read_object, refuse_pointer
from trioserve.models.spec import TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Bits per element of every dtype the format knows; the loader reads fewer.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def read_checkpoint(directory: Path) -> tuple[TensorInfo, ...]:
    """All tensors of the safetensors checkpoint in ``directory``, whole or in shards.

    Raises:
        ModelError: no weights, only pickles, a shard missing, truncated, damaged or a pointer file.
    """
    index = directory / INDEX_NAME
    if index.exists():
        return _read_shards(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if (whole := directory / "model.safetensors") in files:
        files = [whole]
    if not files:
        pickles = sorted(path for glob in PICKLE_PATTERNS for path in directory.glob(glob))
        if pickles:
            raise pickle_refused(pickles[0])
        raise ModelError(f"no weights in {directory}: expected *.safetensors")
    return _merge([read_file(path) for path in files])


def _read_shards(directory: Path, index: Path) -> tuple[TensorInfo, ...]:
    """The tensors that the index names, each found in the shard where it should be."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and shard == os.path.basename(shard) for shard in weight_map.values()
    ):
        raise ModelError(f"{index}: weight_map must map tensor names to file names beside it")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(shards)} shards missing in {directory}: {some(missing)}"
        )
    tensors = _merge([read_file(directory / shard) for shard in shards])
    places = {tensor.name: os.path.basename(tensor.path) for tensor in tensors}
    strayed = [name for name, shard in weight_map.items() if places.get(name) != shard]
    if strayed:
        raise ModelError(
            f"{index} names tensors that are not in their shard: "
            + some([f"{name} ({weight_map[name]})" for name in strayed])
        )
    return tensors


def _merge(files: list[tuple[TensorInfo, ...]]) -> tuple[TensorInfo, ...]:
    seen: dict[str, TensorInfo] = {}
    for tensor in (tensor for file in files for tensor in file):
        if tensor.name in seen:
            raise ModelError(
                f"tensor {tensor.name} is in two files: {seen[tensor.name].path} and {tensor.path}"
            )
        seen[tensor.name] = tensor
    return tuple(seen.values())


def read_file(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        ModelError: it cannot be read, is truncated, or its header is not what the format asks for.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(POINTER))
            refuse_pointer(path, start)
            if len(start) < 8:
                raise ModelError(f"{path} is truncated: {size} bytes, a header has at least 8")
            (length,) = struct.unpack_from("<Q", start)
            if length > MAX_HEADER_BYTES:
                raise ModelError(
                    f"{path} is no safetensors file: header of {length} bytes, "
                    f"at most {MAX_HEADER_BYTES}"
                )
            if 8 + length > size:
                raise ModelError(
                    f"{path} is truncated: {size} bytes, its header alone needs {8 + length}"
                )
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise read_error(path, error) from error
    entries = _parse_header(path, header)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_ranges(path, tensors, 8 + length, size)
    return tuple(tensors)


def _parse_header(path: Path, header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    value.pop("__metadata__", None)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice")
    return value


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One header entry, checked: known dtype, sane shape, and a byte range of just that size."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ModelError(f"{path}: tensor {name} has a malformed header entry")
    if dtype not in DTYPE_BITS:
        raise ModelError(f"{path}: tensor {name} has unknown dtype {dtype}")
    num_bytes = (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
    if num_bytes != end - begin:
        raise ModelError(
            f"{path}: tensor {name} of shape {list(shape)} and dtype {dtype} needs {num_bytes} "
            f"bytes, its range has {end - begin}"
        )
    return TensorInfo(
        name=name,
        path=str(path),
        dtype=dtype,
        shape=tuple(shape),
        offset=data_start + begin,
        num_bytes=num_bytes,
    )


def _check_ranges(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """The ranges tile the file: ``[data_start, size)`` without overlap, hole or missing end."""
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps the one before" if tensor.offset < end else "leaves a hole before it"
            raise ModelError(f"{path}: tensor {tensor.name} {fault}, at byte {tensor.offset}")
        end += tensor.num_bytes
    if end > size:
        raise ModelError(f"{path} is truncated: {size} bytes, its tensors end at {end}")
    if end < size:
        raise ModelError(f"{path} has {size - end} bytes after its last tensor, at byte {end}")


def some(names: list[str], limit: int = 5) -> str:
    """The first few of ``names``, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
