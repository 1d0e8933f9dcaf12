"""Runtimes execute the cache's plans: they own the pool's tensors and run the model's forward."""
