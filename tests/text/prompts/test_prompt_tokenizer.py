"""Only the new pieces of a conversation are tokenized, and the tokens are those of the whole text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rootstock.cache.types import Tokens
from rootstock.errors import PromptTextTooLong
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.prompts import tenant_salt
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, TokenizedPieces
from rootstock.text.prompts.splicing import Asker
from waiting import join

ANYBODY = Asker(tenant_salt.ANYBODY, {})


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_chat(self, rendered: str) -> Tokens:
        self.encoded.append(rendered)
        return super().encode_chat(rendered)


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]


def encoded(tokenized: TokenizedPieces, text: str, salt: str = "") -> Tokens:
    pieces = ByteTokenizer().pieces(text)
    encode = tokenized.encoder(pieces, salt)
    return np.concatenate([encode(at) for at in range(len(pieces))])


def rendered(messages: Sequence[dict[str, Any]]) -> str:
    return ByteTokenizer().render_chat(messages, [])


def test_only_the_new_end_of_a_later_turn_is_tokenized() -> None:
    counting = CountingTokenizer()
    tokenized = TokenizedPieces(counting, cap_bytes=10**6)
    said = ["one", "two", "three", "four", "five"]
    for turn in range(1, len(said) + 1, 2):
        text = rendered(chat(*said[:turn]))
        counting.encoded.clear()
        tokens = encoded(tokenized, text)
        assert np.array_equal(tokens, ByteTokenizer().encode_chat(text))
        assert tokens.dtype == np.int32
    assert counting.encoded == ["<|assistant|>four", "<|user|>five"]


def test_the_caller_owns_the_returned_tokens() -> None:
    tokenizer = PromptTokenizer(ByteTokenizer(), 10_000)
    text = rendered(chat("hello"))
    tokenizer.encode_chat(text, ANYBODY).tokens()[:] = 0
    assert np.array_equal(tokenizer.encode_chat(text, ANYBODY).tokens(), ByteTokenizer().encode_chat(text))


def test_tenants_do_not_share_pieces() -> None:
    counting = CountingTokenizer()
    tokenized = TokenizedPieces(counting, cap_bytes=10**6)
    text = rendered(chat("a secret"))
    encoded(tokenized, text, "one")
    first = list(counting.encoded)
    encoded(tokenized, text, "another")
    assert counting.encoded == first * 2


def test_least_recently_used_pieces_are_dropped_first() -> None:
    counting = CountingTokenizer()
    tokenized = TokenizedPieces(counting, cap_bytes=20_000)
    kept = rendered(chat("kept"))
    for i in range(200):
        encoded(tokenized, rendered(chat(f"{i} " * 20)))
        encoded(tokenized, kept)
        assert tokenized.held_bytes <= 20_000
    counting.encoded.clear()
    encoded(tokenized, kept)
    assert counting.encoded == []
    encoded(tokenized, rendered(chat("0 " * 20)))
    assert any("0 0" in piece for piece in counting.encoded)


def test_a_piece_larger_than_the_cap_is_tokenized_and_not_kept() -> None:
    tokenized = TokenizedPieces(ByteTokenizer(), cap_bytes=1000)
    text = rendered(chat("long " * 1000))
    assert np.array_equal(encoded(tokenized, text), ByteTokenizer().encode_chat(text))
    assert tokenized.held_bytes <= 1000


def test_threads_can_tokenize_at_once() -> None:
    tokenized = TokenizedPieces(ByteTokenizer(), cap_bytes=5_000)
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            text = rendered(chat(*(str(rng.integers(5)) * 30 for _ in range(5))))
            if not np.array_equal(encoded(tokenized, text), ByteTokenizer().encode_chat(text)):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert not wrong
    assert tokenized.held_bytes <= 5_000


def test_a_text_of_too_many_characters_is_refused_before_it_is_tokenized() -> None:
    counting = CountingTokenizer()
    tokenizer = PromptTokenizer(counting, limit_tokens=100)
    text = "a" * (100 * counting.longest_token_chars + 1)
    for refused in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_chat(text, ANYBODY)):
        said = f"{len(text):,} characters, which make more than 100 tokens"
        with pytest.raises(PromptTextTooLong, match=said):
            refused()
    assert counting.encoded == []


def test_a_text_of_likely_too_many_tokens_is_tokenized_no_further_than_twice_the_limit() -> None:
    counting = CountingTokenizer()
    limit = 1_000_000
    tokenizer = PromptTokenizer(counting, limit)
    with pytest.raises(PromptTextTooLong):
        tokenizer.encode_chat("a" * (9 * limit), ANYBODY)
    assert sum(map(len, counting.encoded)) < 2 * limit + 65_536 + 1


class TenCharTokenizer(CountingTokenizer):
    """A tokenizer with one token for each ten characters."""

    def encode_chat(self, rendered: str) -> Tokens:
        return super().encode_chat(rendered)[::10]


def test_a_text_of_many_characters_and_few_tokens_is_accepted() -> None:
    tokenizer = PromptTokenizer(TenCharTokenizer(), limit_tokens=10_000)
    assert len(tokenizer.encode_chat("a" * 90_000, ANYBODY).tokens()) == 9_000
