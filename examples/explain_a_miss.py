"""Ask why a prompt was not found in the cache: python examples/explain_a_miss.py [MODEL]"""

import sys

from rootstock import LLM, SamplingParams
from rootstock.bench.tiny_model import ensure_tiny_model

model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_tiny_model())

RULES = "Count every shelf twice. Note the date. Sign each line. " * 6


def conversation(date: str, question: str) -> list[dict[str, str]]:
    """A common mistake: text that changes with every request stands before text that stays the same."""
    return [
        {"role": "system", "content": f"Today is {date}. {RULES}"},
        {"role": "user", "content": question},
    ]


with LLM(model, max_model_len=2048) as llm:
    params = SamplingParams(temperature=0, max_tokens=8)
    llm.chat(conversation("Monday", "Which shelf is full?"), params)

    # `explain_chat` and `explain` compute nothing. They tell how far a prompt would hit now, and why no further.
    for date, question in [("Monday", "Which item is missing?"), ("Tuesday", "Which shelf is full?")]:
        found = llm.explain_chat(conversation(date, question))
        print(f"{date}, {question!r}: {found.matched_tokens} of {found.prompt_tokens} tokens, {found.cap}")
        print(f"  {found.message}")

    # A prompt of another salt belongs to another tenant: nothing is shared.
    found = llm.explain_chat(conversation("Monday", "Which shelf is full?"), cache_salt="another tenant")
    print(f"another salt: {found.matched_tokens} tokens, {found.cap}")
