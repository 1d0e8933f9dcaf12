"""Hypothesis profiles: quick and repeatable by default, long and random with ROOTSTOCK_SOAK=1."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("quick", derandomize=True, database=None, **_COMMON)
settings.register_profile("soak", max_examples=20_000, database=None, **_COMMON)
settings.load_profile("soak" if os.environ.get("ROOTSTOCK_SOAK") else "quick")
