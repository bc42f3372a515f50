"""Whether a model's layers can run as one kernel. Imports numba only when it is asked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trioserve.models.attention import AttentionBackend, NumbaAttention

if TYPE_CHECKING:
    from trioserve.models.panels import PanelKernels

log = logging.getLogger("trioserve.kernels")


def compile_kernels(attention: AttentionBackend) -> PanelKernels | None:
    """The kernels of ``trioserve.models.panels``; None, and a line in the log, where they do not
    work or attention is not numba's."""
    if not isinstance(attention, NumbaAttention):
        return None
    try:
        from trioserve.models.panels import PanelKernels

        return PanelKernels.compile(attention.team)
    except Exception as error:  # a compiler has many ways to fail
        log.warning("layers run one by one: their kernel does not work here (%s)", error)
        return None
