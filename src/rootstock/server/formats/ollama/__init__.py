"""Ollama's API as a wire format: its routes begin with `/api`, and its streams are lines of JSON."""
