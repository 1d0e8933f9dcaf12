"""The engine: one thread that owns the runtime, batches requests continuously and tells each one how it ended."""
