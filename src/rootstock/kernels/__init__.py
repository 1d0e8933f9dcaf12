"""Attention over the paged pool: one file per way of doing it, and `reference.py`, which they all must equal."""
