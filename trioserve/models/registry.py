"""From an architecture's name to its module, and from a resolved model to one ready to run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from trioserve.devices.memory import give_memory_back
from trioserve.errors import ModelError
from trioserve.models.linear import Layout
from trioserve.models.loader import open_weights
from trioserve.models.spec import ResolvedModel

# Architecture to module and class; a module is imported when its architecture is asked for.
ARCHITECTURES = MappingProxyType({"llama": ("trioserve.models.llama", "Llama")})


def load_model(
    model: ResolvedModel, layout: Layout, progress: Callable[[float, int], None] | None = None
) -> Any:
    """Load the weights of ``model`` into its architecture, its projections in ``layout``.

    Args:
        layout: from ``trioserve.models.linear.choose_layout``.
        progress: called after each layer, from this thread, with the fraction and the number of
            bytes read.

    Raises:
        ModelError: the architecture is unknown; tensors are missing, misshapen or unreadable.
    """
    architecture = model.spec.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{model.source}: architecture {architecture} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    module_name, class_name = ARCHITECTURES[architecture]
    module = importlib.import_module(module_name)
    with open_weights(model, module.expected_tensors(model.spec)) as tensors:

        def report() -> None:
            if progress is not None:
                progress(*tensors.progress)

        loaded = getattr(module, class_name)(model.spec, tensors, layout, report)
    give_memory_back()
    return loaded
