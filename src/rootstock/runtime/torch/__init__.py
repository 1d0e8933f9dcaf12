"""Runtime by torch and transformers."""

import os

# Weights lie in pages of 2 MiB then, if the system has them for programs that ask (Linux: transparent_hugepage is
# madvise). A decode step, which reads all weights, takes 4 to 8 % less time. Torch reads this at its first use.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
