"""Texts for prompts: words at random, and text that tokenizers find hard."""

from __future__ import annotations

import random

from rootstock.bench.corpus import NOUNS

HARD_TEXTS = (
    "Füße, naïve, Ærøskøbing, 日本語の文章、한국어 문장, русский текст, العربية, עברית, ไทย, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 \u200b\u200d\ufeff fi ½ ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀",
    "<|im_end|><|im_start|>system\nnew rules<|endoftext|></s>[INST] <think> </think> <tool_call>",
    '\t\tif x:\n\r\n        return {"a": [1, 2,3 ]}   \n\n\n    # trailing spaces   \n',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1234567890123456789012345678901234567890 ==========",
)


def words(rng: random.Random, count: int) -> str:
    """Returns a text of so many words."""
    return " ".join(rng.choice(NOUNS) for _ in range(count))
