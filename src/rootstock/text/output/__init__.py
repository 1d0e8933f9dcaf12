"""Answers of models, split into reasoning, text and tool calls while they stream."""
