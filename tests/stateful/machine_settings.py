"""How long the rule machines look. TRIOSERVE_EXAMPLES=20 multiplies the examples by 20."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def machine_settings(max_examples: int) -> settings:
    factor = int(os.environ.get("TRIOSERVE_EXAMPLES", "1"))
    return settings(
        max_examples=max_examples * factor,
        derandomize=factor == 1,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
