"""What stays in the cache longer than its use: wishes of clients, grants, pauses between requests, pins."""
