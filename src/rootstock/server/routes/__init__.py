"""Routes beside the wire formats: probes, models' adapters, the cache, pins, prompts, documentation, dashboard."""
