"""Text: conversations, their prompts, the constraints of answers, and what answers mean. It knows no engine."""
