"""Chat, and count the tokens that the cache saves: python examples/chat_with_shared_prefix.py [MODEL]"""

import sys

from rootstock import LLM, SamplingParams
from rootstock.bench.tiny_model import ensure_tiny_model

model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_tiny_model())

SYSTEM = {"role": "system", "content": "You keep the ledger of a warehouse. Answer in one sentence. " * 8}
QUESTIONS = ["What is on shelf four?", "And below it?", "Write that down, please."]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Find an item in the ledger"}}]

with LLM(model, max_model_len=4096) as llm:
    params = SamplingParams(temperature=0, max_tokens=16)

    # Each turn resends the conversation. Only the new question is computed.
    messages = [SYSTEM]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, params, tools=TOOLS)[0]
        messages.append({"role": "assistant", "content": output.text})
        print(f"{question} -> {output.text!r}")
        print(f"  {output.cached_tokens} of {output.prompt_tokens} prompt tokens cached")

    # Several conversations at once share the system prompt, even while it is computed.
    llm.clear_cache()
    conversations = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, params)
    print("at once, cold:", [output.cached_tokens for output in outputs], "tokens cached")
    print(f"hit rate: {llm.stats().cache.hit_rate:.0%}")
