"""Only what is new of a conversation is tokenised, and its tokens are those of the whole text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rootstock.cache.types import Tokens
from rootstock.engine.prompts.prompt_tokenizer import PromptTokenizer, TokenizedPieces
from rootstock.errors import PromptTextTooLong
from rootstock.testing.byte_tokenizer import ByteTokenizer
from waiting import join


class CountingCodec(ByteTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_chat(self, rendered: str) -> Tokens:
        self.encoded.append(rendered)
        return super().encode_chat(rendered)


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]


def rendered(messages: Sequence[dict[str, Any]]) -> str:
    return ByteTokenizer().render_chat(messages, [])


def test_a_later_turn_tokenises_its_new_end_only() -> None:
    codec = CountingCodec()
    tokenized = TokenizedPieces(codec)
    said = ["one", "two", "three", "four", "five"]
    for turn in range(1, len(said) + 1, 2):
        text = rendered(chat(*said[:turn]))
        codec.encoded.clear()
        tokens = tokenized.encode_chat(text, "")
        assert np.array_equal(tokens, ByteTokenizer().encode_chat(text))
        assert tokens.dtype == np.int32
    assert codec.encoded == ["<|assistant|>four", "<|user|>five"]


def test_what_is_answered_is_the_callers_own() -> None:
    tokenized = TokenizedPieces(ByteTokenizer())
    text = rendered(chat("hello"))
    tokenized.encode_chat(text, "")[:] = 0
    assert np.array_equal(tokenized.encode_chat(text, ""), ByteTokenizer().encode_chat(text))


def test_tenants_do_not_share_pieces() -> None:
    codec = CountingCodec()
    tokenized = TokenizedPieces(codec)
    text = rendered(chat("a secret"))
    tokenized.encode_chat(text, "one")
    first = list(codec.encoded)
    tokenized.encode_chat(text, "another")
    assert codec.encoded == first * 2


def test_pieces_that_were_not_used_for_longest_make_room() -> None:
    codec = CountingCodec()
    tokenized = TokenizedPieces(codec, cap_bytes=20_000)
    kept = rendered(chat("kept"))
    for i in range(200):
        tokenized.encode_chat(rendered(chat(f"{i} " * 20)), "")
        tokenized.encode_chat(kept, "")
        assert tokenized.held_bytes <= 20_000
    codec.encoded.clear()
    tokenized.encode_chat(kept, "")
    assert codec.encoded == []
    tokenized.encode_chat(rendered(chat("0 " * 20)), "")
    assert any("0 0" in piece for piece in codec.encoded)


def test_a_piece_larger_than_the_room_is_tokenised_and_not_kept() -> None:
    tokenized = TokenizedPieces(ByteTokenizer(), cap_bytes=1000)
    text = rendered(chat("long " * 1000))
    assert np.array_equal(tokenized.encode_chat(text, ""), ByteTokenizer().encode_chat(text))
    assert tokenized.held_bytes <= 1000


def test_threads_may_ask_at_once() -> None:
    tokenized = TokenizedPieces(ByteTokenizer(), cap_bytes=5_000)
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            text = rendered(chat(*(str(rng.integers(5)) * 30 for _ in range(5))))
            if not np.array_equal(tokenized.encode_chat(text, ""), ByteTokenizer().encode_chat(text)):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert not wrong
    assert tokenized.held_bytes <= 5_000


def test_a_text_of_too_many_characters_is_refused_before_it_is_tokenized() -> None:
    codec = CountingCodec()
    tokenizer = PromptTokenizer(codec, limit_tokens=100)
    text = "a" * (100 * codec.longest_token_chars + 1)
    for refused in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_chat(text, ""),
        lambda: tokenizer.place_chat(text),
    ):
        with pytest.raises(
            PromptTextTooLong, match=f"{len(text):,} characters, which make more than 100 tokens"
        ):
            refused()
    assert codec.encoded == []


def test_a_text_of_likely_too_many_tokens_is_tokenized_no_further_than_twice_the_limit() -> None:
    codec = CountingCodec()
    limit = 1_000_000
    tokenizer = PromptTokenizer(codec, limit)
    with pytest.raises(PromptTextTooLong):
        tokenizer.encode_chat("a" * (9 * limit), "")
    assert sum(map(len, codec.encoded)) < 2 * limit + 65_536 + 1


class LongTokenCodec(CountingCodec):
    """A token for each ten characters."""

    def encode_chat(self, rendered: str) -> Tokens:
        return super().encode_chat(rendered)[::10]


def test_a_text_of_many_characters_and_few_tokens_is_accepted() -> None:
    codec = LongTokenCodec()
    tokenizer = PromptTokenizer(codec, limit_tokens=10_000)
    assert len(tokenizer.encode_chat("a" * 90_000, "")) == 9_000
