"""Models by name: which are loaded, which are in use, what they are."""
