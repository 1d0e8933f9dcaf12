"""The way of an answer: from an `ApiCall` through the engine to the client, in the format of the call."""
