"""The canonical conversation, to which every wire format translates and from which prompts are rendered."""
