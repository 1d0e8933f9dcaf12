"""OpenMP's waiting policy for the threads of a forward. libgomp reads it when torch is loaded."""

from __future__ import annotations

import os

# 1,000 spins take tens of microseconds. A forward on a CPU has hundreds of parallel regions with short gaps, and a
# sleeping thread takes time to wake. A spinning thread takes a processor from others: beside one other busy process,
# libgomp's default of 300,000 spins made steps five times as long.
SPINS = 1000
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Makes waiting threads spin briefly before they sleep, unless the environment names a policy."""
    if not any(choice in os.environ for choice in _CHOICES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
