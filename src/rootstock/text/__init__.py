"""Text: conversations, their prompts, the constraints of answers, and the parsing of answers. It knows no engine."""
