"""OpenAI's Responses API: its wire format, its store of responses, and its routes."""
