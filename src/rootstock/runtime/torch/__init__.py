"""Runtime by torch and transformers."""

import os

# Weights lie in pages of 2 MiB then, if the system has such pages for who asks (Linux: transparent_hugepage=madvise). A
# decode step, which reads all weights, takes 4 to 8 % less time. Torch reads the variable when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
