"""How the threads of a forward wait for each other: to be said before torch is loaded, which reads it then."""

from __future__ import annotations

import os

# Tens of microseconds. A forward on a CPU is hundreds of parallel regions with a little in between, and a thread that
# sleeps takes time to wake. One that spins keeps a processor from whoever has work: beside one other busy process
# libgomp's own 300,000 made steps five times as long.
SPINS = 1000
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Threads look for work for a moment before they sleep, unless the environment says otherwise."""
    if not any(choice in os.environ for choice in _CHOICES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
