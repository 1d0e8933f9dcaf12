"""The library on the oracle runtime, where every answer is known: wrong sharing or a wrong order shows."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llm.conftest import Oracle
from rootstock import LLM, SamplingParams, TextDelta
from rootstock.config import CacheConfig
from rootstock.engine.build import assemble
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import (
    ChatTemplateFailed,
    EmptyPrompt,
    InvalidParameter,
    LLMClosed,
    PromptTooLong,
    QueueFull,
    RootstockError,
    StepFailed,
    Unsupported,
)
from rootstock.runtime.base import Batch
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from waiting import HANG_S, join, wait_for, wait_until

Make = Callable[..., Oracle]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
PROMPTS = [list(range(20, 60)), list(range(20, 50)), list(range(90, 100)), [7]]


class Gate:
    """A fault that raises nothing. It holds forwards back while it is closed."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._open.set()

    def __call__(self, batch: Batch) -> None:
        if not self._open.is_set():
            self.reached.set()
            wait_for(self._open)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


def idle(llm: LLM) -> bool:
    stats = llm.stats()
    return stats.running == stats.waiting == stats.cache.leases == 0


# ---------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("families", [(FULL,), (FULL, window(24), STATE)], ids=["full", "hybrid"])
def test_answers_are_right_cold_warm_batched_and_streamed(oracle: Make, families: tuple[object, ...]) -> None:
    one = oracle(families)
    expected = [one.answer(prompt, 6) for prompt in PROMPTS]
    batched = one.llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in batched] == expected
    assert [output.prompt_token_ids for output in batched] == [tuple(prompt) for prompt in PROMPTS]
    for prompt, right in zip(PROMPTS, expected, strict=True):
        (warm,) = one.llm.generate(prompt, GREEDY)
        assert warm.token_ids == right
        # A prompt of a hybrid resumes at a checkpoint before its last token, where one was left.
        least = len(prompt) - 1 if families == (FULL,) else 0
        assert least <= warm.cached_tokens < warm.prompt_tokens == len(prompt)
        pieces = list(one.llm.stream(np.array(prompt), GREEDY))
        assert tuple(piece.token_id for piece in pieces[:-1]) == right
        assert "".join(piece.text for piece in pieces) == warm.text
        assert pieces[-1].finish_reason == warm.finish_reason == "length"
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == warm.completion_tokens == 6
    assert idle(one.llm)


def test_text_and_token_ids_of_it_are_one_prompt(one: Oracle) -> None:
    by_text, by_ids = one.llm.generate(["In the end", one.tokenizer.encode("In the end")], GREEDY)
    assert by_text.token_ids == by_ids.token_ids == one.answer(list(b"In the end"), 6)
    assert (by_text.prompt, by_ids.prompt) == ("In the end", None)
    assert one.llm.generate([], GREEDY) == []


def test_each_prompt_has_its_own_parameters(one: Oracle) -> None:
    lengths = [1, 4, 2, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    assert [len(output.token_ids) for output in one.llm.generate(PROMPTS, params)] == lengths
    with pytest.raises(InvalidParameter, match="a list of 4"):
        one.llm.generate(PROMPTS, params[:3])


def test_more_prompts_than_the_queue_holds_are_answered_in_order(oracle: Make) -> None:
    one = oracle(max_batch=2, max_queue=1)
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    outputs = one.llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [one.answer(prompt, 6) for prompt in prompts]

    async def asked() -> list[tuple[int, ...]]:
        return [output.token_ids for output in await one.llm.agenerate(prompts, GREEDY)]

    assert asyncio.run(asked()) == [output.token_ids for output in outputs]


def test_several_answers_share_their_prompt_and_differ_by_seed(one: Oracle) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=8, temperature=1.0, logprobs=2, prompt_logprobs=1)
    first, again = one.llm.generate(PROMPTS[0], params)[0], one.llm.generate(PROMPTS[0], params)[0]
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len({answer.token_ids for answer in first.outputs}) == 3
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    alone = SamplingParams(seed=12, max_tokens=8, temperature=1.0)
    assert one.llm.generate(PROMPTS[0], alone)[0].token_ids == first.outputs[1].token_ids
    for answer in first.outputs:
        assert answer.logprobs is not None
        assert [scored.token for scored in answer.logprobs] == list(answer.token_ids)
        assert all(len(scored.top) == 2 for scored in answer.logprobs)
    assert first.prompt_logprobs[0] is None
    assert [s.token for s in first.prompt_logprobs[1:] if s is not None] == PROMPTS[0][1:]
    indices = {piece.index for piece in one.llm.stream(PROMPTS[0], params)}
    assert indices == {0, 1, 2}


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(one: Oracle) -> None:
    # A prompt whose answer has four different letters, to be stopped in the middle.
    prompts = ([i, j] for i in range(200) for j in range(5))
    answers = ((prompt, one.answer(prompt, 4)) for prompt in prompts)
    prompt, tokens = next(
        (prompt, tokens)
        for prompt, tokens in answers
        if len(set(tokens)) == 4 and all(32 < token < 127 for token in tokens)
    )
    text = bytes(tokens).decode()
    params = SamplingParams(temperature=0, max_tokens=50, stop=[text[1:3], "never"])
    (output,) = one.llm.generate([prompt], params)
    assert (output.text, output.finish_reason) == (text[0], "stop")
    assert output.outputs[0].stop_reason == text[1:3]
    pieces = list(one.llm.stream(prompt, params))
    assert "".join(piece.text for piece in pieces) == text[0]
    assert pieces[-1].stop_reason == text[1:3]
    (by_id,) = one.llm.generate([prompt], SamplingParams(temperature=0, stop_token_ids=[tokens[2]]))
    assert (by_id.token_ids, by_id.outputs[0].stop_reason) == (tokens[:2], tokens[2])


def test_parameters_that_are_not_given_are_the_models(oracle: Make) -> None:
    one = oracle(defaults=SamplingDefaults(temperature=0.0))
    (greedy,) = one.llm.generate([PROMPTS[0]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert greedy.token_ids == one.answer(PROMPTS[0], 6)
    (drawn,) = one.llm.generate([PROMPTS[0]], SamplingParams(temperature=2.0, max_tokens=20, seed=1))
    assert drawn.token_ids[:6] != greedy.token_ids


def test_max_tokens_beyond_the_context_is_lowered(oracle: Make) -> None:
    one = oracle(context_limit=50)
    (output,) = one.llm.generate(PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (10, "length")


# ------------------------------------------------------------------------------------------------- chat


def test_a_chat_with_an_image_is_refused(one: Oracle) -> None:
    """A program reads the error. An agent's session over HTTP goes on with a line of text instead."""
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(Unsupported, match="the model does not read it") as refused:
        one.llm.chat([{"role": "user", "content": [picture]}], GREEDY)
    assert refused.value.param == "messages[0].content[0]"


def test_chats_are_rendered_with_the_template_and_share_their_beginning(one: Oracle) -> None:
    system = {"role": "system", "content": "Be brief. " * 5}
    conversations = [[system, {"role": "user", "content": text}] for text in ("Yes?", "No?")]
    outputs = one.llm.chat(conversations, GREEDY)
    for conversation, output in zip(conversations, outputs, strict=True):
        rendered = one.tokenizer.render_chat(conversation, [])
        assert output.prompt_token_ids == tuple(one.tokenizer.encode_chat(rendered).tolist())
        assert output.token_ids == one.answer(output.prompt_token_ids, 6)
    assert max(output.cached_tokens for output in outputs) > 50
    (single,) = one.llm.chat(conversations[0], GREEDY, tools=[{"function": {"name": "look"}}])
    assert single.prompt_tokens > outputs[0].prompt_tokens
    pieces = list(one.llm.chat_stream(conversations[0], GREEDY))
    assert tuple(piece.token_id for piece in pieces[:-1]) == outputs[0].token_ids
    assert pieces[0].cached_tokens == outputs[0].prompt_tokens - 1


def test_special_tokens_in_a_message_are_plain_text(one: Oracle) -> None:
    (output,) = one.llm.chat([{"role": "user", "content": "<|end|>"}], GREEDY)
    assert output.prompt_token_ids.count(one.tokenizer.END) == 1  # the template's own


def test_wrong_messages_are_refused_by_name(oracle: Make) -> None:
    llm = oracle().llm
    with pytest.raises(InvalidParameter, match="role"):
        llm.chat([{"role": "nurse", "content": "Hello"}], GREEDY)
    with pytest.raises(Unsupported, match=r"chat_template_kwargs\.enable_thinkin"):
        llm.chat([{"role": "user", "content": "Hi"}], chat_template_kwargs={"enable_thinkin": True})
    with pytest.raises((EmptyPrompt, ChatTemplateFailed)):
        llm.chat([], GREEDY)


# ------------------------------------------------------------------------------------------- the cache


def test_a_miss_is_explained_in_the_prompts_words(one: Oracle) -> None:
    one.llm.generate("The ledger is on the desk.", GREEDY)
    found = one.llm.explain("The ledger is on the floor.")
    assert (found.matched_tokens, found.cap) == (21, "diverged")
    assert "it says 'f', cached prefixes say 'd'" in found.message
    messages = [{"role": "user", "content": "Hi"}]
    assert one.llm.explain_chat(messages).matched_tokens == 0
    one.llm.chat(messages, GREEDY)
    assert one.llm.explain_chat(messages).cap == "last_token"
    assert one.llm.explain_chat(messages, cache_salt="other").cap == "nothing_cached"
    before = one.llm.stats().cache
    assert before.cached_tokens > 0
    assert one.llm.clear_cache(cache_salt="other").blocks == 0
    assert one.llm.clear_cache().blocks > 0
    assert one.llm.stats().cache.cached_tokens == 0


def test_a_salt_keeps_prompts_apart(oracle: Make) -> None:
    llm = oracle().llm
    hits = [
        llm.generate(PROMPTS[0], GREEDY, cache_salt=salt)[0].cached_tokens for salt in ("a", "b", "a", None)
    ]
    assert [hit > 0 for hit in hits] == [False, False, True, False]


# ---------------------------------------------------------------------------------------------- asyncio


def test_asyncio_gives_the_same_answers_and_runs_side_by_side(one: Oracle) -> None:

    async def streamed(prompt: list[int]) -> list[TextDelta]:
        return [piece async for piece in one.llm.astream(prompt, GREEDY)]

    async def everything() -> None:
        for prompt, pieces in zip(
            PROMPTS, await asyncio.gather(*(streamed(prompt) for prompt in PROMPTS)), strict=True
        ):
            assert tuple(piece.token_id for piece in pieces[:-1]) == one.answer(prompt, 6)
        outputs = await one.llm.agenerate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == [one.answer(prompt, 6) for prompt in PROMPTS]
        messages = [{"role": "user", "content": "Hi"}]
        (chatted,) = await one.llm.achat(messages, GREEDY)
        pieces = [piece async for piece in one.llm.achat_stream(messages, GREEDY)]
        assert tuple(piece.token_id for piece in pieces[:-1]) == chatted.token_ids

    asyncio.run(everything())


def test_cancelling_a_task_aborts_its_requests(one: Oracle) -> None:

    async def cancelled() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in one.llm.astream(PROMPTS[0], ENDLESS):
                begun.set()

        tasks = [asyncio.create_task(read()), asyncio.create_task(one.llm.agenerate(PROMPTS, ENDLESS))]
        await asyncio.wait_for(begun.wait(), HANG_S)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended

        async with contextlib.aclosing(one.llm.astream(PROMPTS[1], ENDLESS)) as pieces:
            async for _ in pieces:
                break

    asyncio.run(cancelled())
    wait_until(lambda: idle(one.llm))
    assert one.llm.generate(PROMPTS[0], GREEDY)[0].token_ids == one.answer(PROMPTS[0], 6)


def test_a_stream_that_is_left_aborts_its_request(one: Oracle) -> None:
    stream = one.llm.stream(PROMPTS[0], ENDLESS)
    assert next(stream).token_id == one.answer(PROMPTS[0], 1)[0]
    stream.close()
    stream.close()
    assert list(stream) == []
    with one.llm.stream(PROMPTS[1], ENDLESS) as left:
        next(left)
    unread = one.llm.stream(PROMPTS[2], ENDLESS)
    del unread
    gc.collect()
    wait_until(lambda: idle(one.llm))


# ----------------------------------------------------------------------------------------------- errors


def test_one_wrong_prompt_ends_the_call_and_is_named(one: Oracle) -> None:
    with pytest.raises(PromptTooLong) as refused:
        one.llm.generate([PROMPTS[0], [1] * 5000], ENDLESS)
    assert refused.value.__notes__ == ["in prompt 1 of this call"]
    with pytest.raises(InvalidParameter, match="token ids from 0") as refused_id:
        one.llm.generate([PROMPTS[0], PROMPTS[1], [100_000]], [SamplingParams(n=2, max_tokens=1)] * 3)
    assert refused_id.value.__notes__ == ["in prompt 2 of this call"]
    for wrong in ([[]], [1.5], [[1], "a", None], [[1, [2]]], [[-1]], [[2**40]]):
        with pytest.raises((InvalidParameter, EmptyPrompt)):
            one.llm.generate(wrong, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="prompts"):
        one.llm.generate(5, GREEDY)  # type: ignore[arg-type]
    wait_until(lambda: idle(one.llm))


def test_a_failed_forward_is_raised_and_the_next_call_works(oracle: Make) -> None:
    failing = threading.Event()

    def fault(batch: Batch) -> None:
        if failing.is_set():
            raise RuntimeError("injected")

    one = oracle(fault=fault)
    failing.set()
    with pytest.raises(StepFailed):
        one.llm.generate(PROMPTS, GREEDY)
    wait_until(lambda: idle(one.llm))
    failing.clear()
    assert one.llm.generate(PROMPTS[0], GREEDY)[0].token_ids == one.answer(PROMPTS[0], 6)


def test_a_queue_full_of_other_requests_is_an_error(oracle: Make) -> None:
    gate = Gate()
    one = oracle(fault=gate, max_batch=1, max_queue=1)
    gate.close()
    others = [one.llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    with pytest.raises(QueueFull):
        one.llm.generate(PROMPTS[2], GREEDY)
    gate.open()
    assert [len(list(stream)) for stream in others] == [7, 7]


# ------------------------------------------------------------------------------------------------ close


def test_closing_ends_running_requests_with_an_error_and_refuses_later_calls(oracle: Make) -> None:
    gate = Gate()
    one = oracle(fault=gate)
    stream = one.llm.stream(PROMPTS[0], ENDLESS)
    next(stream)
    gate.close()
    wait_for(gate.reached)
    ends: list[BaseException] = []

    def waits() -> None:
        try:
            one.llm.generate(PROMPTS[1:3], ENDLESS)
        except RootstockError as error:
            ends.append(error)

    async def waits_in_a_task() -> None:
        try:
            async for _ in one.llm.astream(PROMPTS[3], ENDLESS):
                pass
        except RootstockError as error:
            ends.append(error)

    callers = [
        threading.Thread(target=waits),
        threading.Thread(target=lambda: asyncio.run(waits_in_a_task())),
    ]
    closer = threading.Thread(target=one.llm.close)
    for thread in callers:
        thread.start()
    wait_until(lambda: one.llm._engine.health().waiting + one.llm._engine.health().running >= 4)
    closer.start()
    gate.open()
    join(*callers, closer)
    assert [type(error) for error in ends] == [LLMClosed, LLMClosed]
    with pytest.raises(LLMClosed, match="closed"):
        list(stream)
    one.llm.close()
    for call in (
        lambda: one.llm.generate("Hello"),
        lambda: one.llm.chat([{"role": "user", "content": "Hi"}]),
        lambda: one.llm.stream("Hello"),
        lambda: one.llm.explain("Hello"),
        lambda: asyncio.run(one.llm.agenerate("Hello")),
        one.llm.stats,
        one.llm.clear_cache,
    ):
        with pytest.raises(LLMClosed):
            call()
    assert not any(thread is one.llm._engine._thread for thread in threading.enumerate())


def test_leaving_the_block_closes(oracle: Make) -> None:
    with oracle().llm as llm:
        thread = llm._engine._thread
        assert thread.is_alive()
    assert not thread.is_alive()

    async def opened() -> None:
        async with oracle().llm as inner:
            await inner.agenerate("Hello", GREEDY)
        with pytest.raises(LLMClosed):
            inner.stats()

    asyncio.run(opened())


def test_a_library_that_nothing_refers_to_ends_its_thread() -> None:
    tokenizer = ByteTokenizer()
    runtime = FakeRuntime(tokenizer.vocab_size, 4096, eos_token_ids=tokenizer.eos_token_ids)
    llm = LLM.from_assembly(assemble(runtime, tokenizer, CacheConfig(8, budget_bytes=1 << 16)))
    thread = llm._engine._thread
    assert thread is not None
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    del llm
    gc.collect()
    wait_until(lambda: not thread.is_alive())


UNCLOSED = """
import sys
from pathlib import Path
from rootstock import LLM, SamplingParams
from rootstock.config import CacheConfig, TierConfig
from rootstock.engine.build import assemble
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime

tokenizer = ByteTokenizer()
runtime = FakeRuntime(tokenizer.vocab_size, 4096, eos_token_ids=tokenizer.eos_token_ids)
tier = TierConfig(Path(sys.argv[1]), 1 << 26)
llm = LLM.from_assembly(assemble(runtime, tokenizer, CacheConfig(8, budget_bytes=1 << 16), tier=tier))
print(llm.generate("A ledger of four columns. " * 8, SamplingParams(temperature=0, max_tokens=2))[0].cached_tokens)
"""


def test_a_disk_tier_is_written_when_the_interpreter_ends(tmp_path: Path) -> None:
    def cached_tokens() -> int:
        command = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert not done.stderr
        return int(done.stdout)

    assert cached_tokens() == 0
    assert cached_tokens() > 100
