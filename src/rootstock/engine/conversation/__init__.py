"""The canonical conversation: the form that every wire format is translated to, and that prompts are rendered from."""
