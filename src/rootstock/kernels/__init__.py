"""Attention kernels over the paged pool, by backend, and `reference.py`, the oracle that each of them must equal."""
