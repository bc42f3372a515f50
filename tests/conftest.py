"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
