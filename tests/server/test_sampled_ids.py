"""The next turn of a chat finds the sampled ids of the answer before it, over HTTP."""

from __future__ import annotations

from typing import Any

from rootstock.testing.byte_tokenizer import ByteTokenizer

CHAT, EXPLAIN, CLEAR = "/v1/chat/completions", "/v1/cache/explain", "/v1/cache/clear"
# Bytes that are no text, such as half of a character, have other tokens when they come back as U+FFFD.
ONLY_TEXT = {str(token): -100 for token in range(256, ByteTokenizer.vocab_size)}


def test_an_answer_that_comes_back_is_found_by_its_ids(serve: Any) -> None:
    with serve() as served:
        messages: list[dict[str, str]] = [{"role": "user", "content": "once upon a time"}]
        prompt_tokens = 0
        for turn in range(3):
            body = {"messages": messages, "max_tokens": 40, "logit_bias": ONLY_TEXT, "ignore_eos": True}
            answer = served.client.post(CHAT, json=body).json()
            usage = answer["usage"]
            expected = prompt_tokens + 40 - 1 if turn else 0
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected
            prompt_tokens = usage["prompt_tokens"]
            content = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
            told = served.client.post(EXPLAIN, json={"messages": messages}).json()
            assert told["sampled_tokens"] == 40 * (turn + 1)
            assert told["found_tokens"] == prompt_tokens + 40 - 1
        assert "\ufffd" in str(messages), "some answer has bytes that are no text"
        assert served.metric("rootstock_sampled_answers_total", event="remembered") == 3
        assert served.metric("rootstock_spliced_prompt_tokens_total") >= 40 * 3
        served.client.post(CLEAR)
        assert served.client.post(EXPLAIN, json={"messages": messages}).json()["sampled_tokens"] == 0
