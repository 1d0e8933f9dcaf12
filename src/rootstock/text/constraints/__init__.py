"""Constraints of answers: grammars, JSON schemas and reasoning budgets, which the sampler enforces."""
