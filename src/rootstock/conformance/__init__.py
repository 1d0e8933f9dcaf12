"""Conformance suite of prompt caches: whether a server's cache tells the truth, asked by HTTP alone."""
