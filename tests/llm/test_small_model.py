"""A model in float32: the same answer cold, warm, batched, streamed, by asyncio, and by transformers itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootstock import LLM, SamplingParams
from rootstock.errors import ModelPathNotFound, PromptTextTooLong, PromptTooLong

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHARED = "The warehouse keeps its ledger in four columns: item, shelf, count and date. " * 4
PROMPTS = [SHARED + end for end in ("Which shelf is full?", "Which item is missing?", "")] + ["Once"]


@pytest.fixture(scope="module")
def llm(small_model: Path) -> Iterator[LLM]:
    with LLM(
        str(small_model), dtype="float32", device="cpu", threads=1, budget_bytes="64MiB", max_model_len=1024
    ) as llm:
        yield llm


def reference(model: Path, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    import torch
    from transformers import AutoModelForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    so_far = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            so_far.append(int(dense(torch.tensor([so_far])).logits[0, -1].argmax()))
    return tuple(so_far[len(tokens) :])


def test_greedy_answers_are_equal_cold_warm_batched_streamed_and_dense(llm: LLM, small_model: Path) -> None:
    batched = llm.generate(PROMPTS, GREEDY)
    assert all(len(output.token_ids) == 24 for output in batched)
    assert batched[0].token_ids == reference(small_model, batched[0].prompt_token_ids, 24)
    for prompt, expected in zip(PROMPTS, batched, strict=True):
        llm.clear_cache()
        (cold,), (warm,) = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, cold.prompt_tokens - 1)
        pieces = list(llm.stream(prompt, GREEDY))
        assert cold.token_ids == warm.token_ids == expected.token_ids
        assert tuple(piece.token_id for piece in pieces[:-1]) == expected.token_ids
        assert "".join(piece.text for piece in pieces) == cold.text == warm.text == expected.text

    async def all_at_once() -> list[tuple[int, ...]]:
        outputs = await asyncio.gather(*(llm.agenerate(prompt, GREEDY) for prompt in PROMPTS))
        return [output.token_ids for (output,) in outputs]

    assert asyncio.run(all_at_once()) == [output.token_ids for output in batched]


def test_a_stop_string_across_tokens_ends_the_answer(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 6]  # longer than a token
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop, "never written"])
    (stopped,) = llm.generate(PROMPTS[0], params)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert "".join(piece.text for piece in llm.stream(PROMPTS[0], params)) == stopped.text


def test_a_chat_finds_its_own_earlier_turns(llm: LLM) -> None:
    messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": "Which shelf is full?"}]
    (first,) = llm.chat(messages, GREEDY)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And below it?"}]
    assert llm.explain_chat(messages).matched_tokens > first.prompt_tokens
    (second,) = llm.chat(messages, GREEDY)
    assert second.cached_tokens > first.prompt_tokens
    with pytest.raises((PromptTooLong, PromptTextTooLong)):
        llm.chat([{"role": "user", "content": SHARED * 200}])


def test_a_missing_model_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelPathNotFound):
        LLM(str(tmp_path / "missing"))
