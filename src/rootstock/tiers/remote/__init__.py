"""Tier that several servers share: records in a Valkey or Redis server."""
