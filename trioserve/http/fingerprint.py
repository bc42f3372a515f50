"""``system_fingerprint``: equal where the same request has the same answer."""

from __future__ import annotations

import hashlib

import trioserve
from trioserve.engine.api import EngineStatus


def system_fingerprint(status: EngineStatus) -> str:
    """Version, and eight digits made of all that changes results: model, storage, arithmetic."""
    parts: list[object] = [status.model_name]
    if (info := status.info) is not None:
        parts += [info.architecture, info.num_parameters, info.vocab_size]
        parts += [info.weights, info.dtype, info.device, info.attention]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    return f"trioserve-{trioserve.__version__}-{digest[:8]}"
