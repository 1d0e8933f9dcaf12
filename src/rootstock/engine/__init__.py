"""The engine: one thread that owns the runtime and batches requests continuously."""
