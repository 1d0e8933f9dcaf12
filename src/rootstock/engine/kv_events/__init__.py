"""KV events: blocks from which a request can resume, announced to routers in vLLM's wire format."""
