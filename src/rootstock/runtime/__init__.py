"""Runtimes execute what the cache plans: they own the pool's tensors and run the model's forward."""
