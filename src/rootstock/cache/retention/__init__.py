"""Reasons to keep an entry beyond its use: wishes of clients, grants, pauses between requests, pins."""
