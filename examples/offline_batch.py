"""Answer many prompts at once: python examples/offline_batch.py [MODEL]"""

import sys

from rootstock import LLM, SamplingParams
from rootstock.bench.tiny_model import ensure_tiny_model

# Without an argument, a small model that is made on the spot: it writes words, not sense.
model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_tiny_model())

SHARED = "The warehouse keeps its ledger in four columns: item, shelf, count and date. " * 4
QUESTIONS = ["Which shelf is full?", "Which item is missing?", "Who wrote the last line?"]

with LLM(model, max_model_len=2048) as llm:
    # One SamplingParams serves all prompts, or a list has one for each.
    params = SamplingParams(temperature=0, max_tokens=24)
    for output in llm.generate([SHARED + question for question in QUESTIONS], params):
        print(f"...{output.prompt[-24:]!r} -> {output.text!r}")
        print(
            f"  {output.cached_tokens} of {output.prompt_tokens} prompt tokens cached, {output.finish_reason}"
        )

    # `n` answers share their prompt, and differ by their seeds.
    params = SamplingParams(temperature=0.8, max_tokens=8, n=3, seed=1)
    for answer in llm.generate(SHARED, params)[0].outputs:
        print(f"answer {answer.index}: {answer.text!r}")
