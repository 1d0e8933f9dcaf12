"""One pipeline from a conversation to its parsed answer, for every wire format and for the library."""
