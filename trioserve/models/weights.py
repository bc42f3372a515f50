"""A model's tensors, held against what its architecture needs before the first is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from trioserve.errors import ModelError
from trioserve.kernels.cpu.codes import Blocks

log = logging.getLogger(__name__)

NAMES_SHOWN = 8
Piece = TypeVar("Piece")


class Weights:
    """What an architecture reads its tensors from, once each and by name.

    Args:
        tensors: name to tensor; a lookup may read a file.
        expected: name to shape of all that must be there.
        optional: whether a name may be there unexpected without a warning.

    Raises:
        ModelError: expected names are missing; it lists the first of them and counts the rest.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        expected: Mapping[str, Sequence[int]],
        optional: Callable[[str], bool] = lambda name: False,
    ) -> None:
        missing = [name for name in expected if name not in tensors]
        if missing:
            raise ModelError(
                f"the checkpoint lacks {_listed(missing)}; it is incomplete or of another model"
            )
        extra = [name for name in tensors if name not in expected and not optional(name)]
        if extra:
            log.warning("the checkpoint holds tensors that the model does not use: %s",
                        _listed(extra))  # fmt: skip
        self._tensors = tensors
        self._expected = expected

    def take(self, name: str) -> Tensor:
        """The tensor as float32, shape checked. Raises ModelError where the shape is wrong."""
        tensor = self._tensors[name]
        self._check_shape(name, tensor.shape)
        return tensor.float()

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        expected = tuple(self._expected[name])
        if tuple(shape) != expected:
            raise ModelError(
                f"tensor {name} has shape {list(shape)}, "
                f"the model's configuration asks for {list(expected)}"
            )

    def take_codes(
        self, names: Sequence[str], orders: Sequence[Tensor | None] | None = None
    ) -> Blocks | None:
        """Several matrices one below the other as the codes that the file holds.

        Args:
            names: of the matrices.
            orders: for each the rows wanted, int64, or None for all as they are.

        Returns:
            None where one is not stored as codes, or not as the same kind as the others.
        """
        code_bits = getattr(self._tensors, "code_bits", None)
        if code_bits is None or len(bits := {code_bits(name) for name in names}) > 1:
            return None
        if None in bits:
            return None
        parts = []
        for name, order in zip(names, orders or [None] * len(names), strict=True):
            part = self._tensors.codes(name)
            self._check_shape(name, part.shape)
            parts.append(part if order is None else part.rows(order))
        return parts[0] if len(parts) == 1 else Blocks.joined(parts)

    def take_joined(self, names: Sequence[str]) -> Tensor:
        """Several tensors one below the other, as one new tensor (a single one as it is)."""
        if len(names) == 1:
            return self.take(names[0])
        return torch.cat([self.take(name) for name in names])


def make_pieces(
    makers: Sequence[Callable[[], Piece]], piece_made: Callable[[], None] = lambda: None
) -> list[Piece]:
    """Make the pieces of a model, as many at a time as torch has threads; gives them in order.

    Packing a matrix is most of the work of loading and runs on one thread inside torch. The
    threads made here end before this returns or raises. While they run torch computes on one
    thread in each: teams of threads in all of them would only stand in each other's way.

    The first maker that fails ends it: those not begun are dropped, its error is raised.
    ``piece_made`` is called after each piece, from the calling thread.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
    try:
        pieces = []
        for future in [pool.submit(maker) for maker in makers]:
            pieces.append(future.result())
            piece_made()
        return pieces
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    counted = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
    return f"{counted}: {shown}" + (f" and {more} more" if more > 0 else "")
