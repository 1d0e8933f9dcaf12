"""Hints of clients to the cache: their fields, their headers, and their translation to the cache's own."""
