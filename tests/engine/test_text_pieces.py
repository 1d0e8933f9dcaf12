"""Cuts of a text: the pieces have the tokens of the whole text, for every kind of tokenizer, or it is not cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    NormalizedString,
    PreTokenizedString,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from rootstock.engine.special_tokens import any_of, cut_for, cut_whole

SPECIAL = ("<s>", "</s>", "<|user|>", "<|user|>\n", "<|end|>", "[INST]", "[INST][/INST]")
TEXT = [Path(__file__).read_text(), "héllo wörld ﬁne 你好 नमस्ते 🙂👩‍👩‍👧 İstanbul e\u0301 café"]


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(content, normalized=False) for content in SPECIAL])
    return tokenizer


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        tokenizer, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"], show_progress=False)
    return trained(tokenizer, trainer)


def prepended() -> Tokenizer:
    """Makes a tokenizer like converted sentencepiece models: a normalizer writes the spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>"], show_progress=False, max_token_length=8
    )
    return trained(tokenizer, trainer)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    return trained(tokenizer, trainer)


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(
        tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    )


def with_difficult_tokens() -> Tokenizer:
    """Makes a tokenizer with added tokens that strip spaces, are spaces, overlap, or are normalized."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("  ", normalized=False)])
    tokenizer.add_tokens([AddedToken("|><|", normalized=False), AddedToken("ﬁne", normalized=True)])
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
        ]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(True),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "prepended": prepended,
    "unigram": unigram,
    "word pieces": word_piece,
    "difficult tokens": with_difficult_tokens,
}


@cache
def made(kind: str) -> tuple[Tokenizer, Callable[[str], list[str]]]:
    tokenizer = KINDS[kind]()
    return tokenizer, cut_for(tokenizer)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


parts = st.one_of(
    st.sampled_from(
        [*SPECIAL, "<left>", "<right>", "<|", "|>", "<|user", "user|>", "[INST", " ", "  ", "\n", "\n\n"]
    ),
    st.sampled_from(
        ["hello", "world", "ﬁne", "fi", "e\u0301", "🙂", "👩‍👩‍👧", "你好", "İ", "\u200d", "\u0301", "▁"]
    ),
    st.just("def f(x):"),
    st.text(max_size=6),
)
texts = st.lists(parts, max_size=14).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_pieces_have_the_tokens_of_the_whole_text(kind: str, text: str) -> None:
    tokenizer, cut = made(kind)
    pieces = cut(text)
    assert "".join(pieces) == text
    assert [id for piece in pieces for id in ids(tokenizer, piece)] == ids(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_cut_before_each_message(kind: str) -> None:
    _, cut = made(kind)
    assert cut("<s>be good<|user|>hi<|end|>") == ["<s>be good", "<|user|>hi", "<|end|>"]
    assert cut("no special token") == ["no special token"]
    assert cut("") == []


class _Reversed:
    """A custom pre-tokenizer, which may look anywhere in the text."""

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(lambda _, part: [part])

    def normalize(self, text: NormalizedString) -> None: ...


def test_texts_are_not_cut_for_tokenizers_of_unknown_behaviour() -> None:
    written = byte_level()
    written.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(_Reversed())
    random = byte_level()
    random.model.dropout = 0.1
    as_text = byte_level()
    as_text.encode_special_tokens = True
    looks_around = byte_level()
    looks_around.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    none = Tokenizer(models.WordLevel({"a": 0}))
    for tokenizer in (written, random, as_text, looks_around, none):
        assert cut_for(tokenizer) is cut_whole


@given(
    strings=st.sets(st.text("ab<|>\n", min_size=1, max_size=5), min_size=1, max_size=8),
    text=st.text("ab<|>\n", max_size=60),
)
def test_a_pattern_of_many_strings_finds_the_leftmost_and_longest(strings: set[str], text: str) -> None:
    longest_first = sorted(strings, key=lambda string: (-len(string), string))
    alternation = re.compile("|".join(map(re.escape, longest_first)))
    found = [match.span() for match in any_of(strings).finditer(text)]
    assert found == [match.span() for match in alternation.finditer(text)]


def test_a_pattern_can_have_hundreds_of_strings_that_are_prefixes_of_each_other() -> None:
    assert any_of("a" * length for length in range(1, 500)).match("a" * 5000)[0] == "a" * 499  # type: ignore[index]


def test_the_common_prefix_of_thousands_of_strings_is_in_the_pattern_once() -> None:
    assert any_of(f"<unused{i}>" for i in range(6000)).pattern.count("<unused") == 1
