"""Tokenizers and incremental detokenization, on byte-level BPE and a SentencePiece-like BPE that are trained here."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from checkpoints import chat_tokenizer
from rootstock.errors import ChatTemplateFailed, ChatTemplateMissing, TokenizerUnusable
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.detokenizer import Detokenizer
from rootstock.text.tokenizer import HFTokenizer, ModelTokenizer, token_text

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Stop strings such as ###, END and </answer> end the text. The end.",
    "Größe, naïve café, Ελληνικά, Русский язык, 日本語のテキスト, 中文字符, 한국어",
    "emoji 😀😃 👩‍👩‍👧‍👦 🇩🇪 and combining e\u0301 n\u0303",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if thinking else '' }}{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


@functools.cache
def byte_level() -> HFTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    return HFTokenizer(wrapped, TEMPLATE)


@functools.cache
def sentencepiece() -> HFTokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = trained.get_vocab()
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: id for id, piece in enumerate(pieces + sorted(learned, key=lambda piece: learned[piece]))}
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )
    return HFTokenizer(wrapped)


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "bytes": ByteTokenizer}
every_tokenizer = pytest.mark.parametrize(
    "tokenizer", [make() for make in TOKENIZERS.values()], ids=list(TOKENIZERS)
)

# Texts from which both trained tokenizers make merged, single-byte and multi-byte tokens.
texts = st.text(
    st.one_of(st.sampled_from("The quick END ###\n é日😀👩‍👧"), st.characters(codec="utf-8")), max_size=60
)
# Without special tokens and SentencePiece's mark of a space, which a tokenizer does not read as plain text.
texts = texts.filter(lambda text: "<" not in text and "▁" not in text)


def streamed(
    tokenizer: ModelTokenizer, tokens: Sequence[int], stops: Sequence[str] = (), context: Sequence[int] = ()
) -> tuple[list[str], str | None]:
    stream = Detokenizer(tokenizer, stops, context)
    deltas: list[str] = []
    for token in tokens:
        delta = stream.push(int(token))
        deltas.append(delta.text)
        if delta.stopped_by:
            assert stream.finish() == ""
            return deltas, delta.stopped_by
    return [*deltas, stream.finish()], None


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, the longer of two that end at once."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


# ---- detokenisation


@every_tokenizer
@given(text=texts)
def test_the_deltas_of_a_text_add_up_to_the_decoded_text(tokenizer: ModelTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text).tolist()
    assert "".join(streamed(tokenizer, tokens)[0]) == tokenizer.decode(tokens) == text


@pytest.mark.parametrize("tokenizer", [byte_level(), ByteTokenizer()], ids=["byte-level", "bytes"])
@given(data=st.data())
def test_the_deltas_of_any_bytes_add_up_to_the_decoded_text(
    tokenizer: ModelTokenizer, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 420), max_size=80))
    assert "".join(streamed(tokenizer, tokens)[0]) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(0, 480), max_size=80))
def test_broken_byte_fallback_never_raises_and_never_takes_back_a_character(tokens: list[int]) -> None:
    tokenizer = sentencepiece()
    text = "".join(streamed(tokenizer, tokens)[0])
    # A run of byte tokens that is broken anywhere decodes to U+FFFD for each byte; a stream has given out the
    # whole characters of the run already.
    replacement = "\N{REPLACEMENT CHARACTER}"
    decoded = tokenizer.decode(tokens)
    assert len(text) <= len(decoded)
    if replacement not in decoded:
        assert text == decoded


@every_tokenizer
@given(prompt=texts, text=texts)
def test_the_deltas_after_a_prompt_add_up_to_the_rest_of_the_text(
    tokenizer: ModelTokenizer, prompt: str, text: str
) -> None:
    before, after = tokenizer.encode(prompt).tolist(), tokenizer.encode(text).tolist()
    whole = tokenizer.decode(before + after)
    assert "".join(streamed(tokenizer, after, context=before)[0]) == whole.removeprefix(
        tokenizer.decode(before)
    )


def test_the_space_before_a_word_is_kept_when_it_continues_a_prompt() -> None:
    tokenizer = sentencepiece()
    prompt, answer = tokenizer.encode("The quick").tolist(), tokenizer.encode("brown fox").tolist()
    assert "".join(streamed(tokenizer, answer)[0]) == "brown fox"
    assert "".join(streamed(tokenizer, answer, context=prompt)[0]) == " brown fox"


@every_tokenizer
def test_a_character_is_given_out_once_its_last_byte_is_there(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode("a👍z").tolist()
    deltas, _ = streamed(tokenizer, tokens)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(deltas)
    assert len([delta for delta in deltas if delta]) == 3


def test_text_before_an_incomplete_character_is_given_out_at_once() -> None:
    stream = Detokenizer(ByteTokenizer())
    assert stream.push(ord("a")).text == "a"
    assert stream.push(0xE2).text == ""
    assert stream.push(0x82).text == ""
    assert stream.push(0xAC).text == "€"
    assert stream.push(0xE2).text == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_character_that_began_in_the_prompt_is_given_out_whole() -> None:
    stream = Detokenizer(ByteTokenizer(), context=[0xE2, 0x82])
    assert stream.push(0xAC).text == "€"


def test_a_prompt_that_ends_with_a_replacement_character_of_its_own_does_not_repeat_it() -> None:
    for text in ("x\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"):
        stream = Detokenizer(ByteTokenizer(), context=ByteTokenizer().encode(text))
        assert stream.push(ord("y")).text == "y"
        assert stream.finish() == ""
        assert Detokenizer(ByteTokenizer(), context=ByteTokenizer().encode(text)).finish() == ""


@every_tokenizer
def test_special_and_unknown_tokens_have_no_text_and_cost_nothing(tokenizer: ModelTokenizer) -> None:
    hidden = [*tokenizer.eos_token_ids, 10**6]
    tokens = [*tokenizer.encode("The quick").tolist()]
    mixed = [each for token in tokens for each in (token, *hidden)]
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push(token).text for token in mixed) + stream.finish() == "The quick"
    assert len(stream._window) <= 4


@pytest.mark.parametrize("broken", [[0x80], [0xF0, 0x9F], [0xE2, 0x82, 0xF0], [0xEF, 0xBF, 0xBD]])
def test_a_window_of_broken_bytes_does_not_grow(broken: list[int]) -> None:
    tokenizer = ByteTokenizer()
    tokens = (broken * 300)[:600]
    stream = Detokenizer(tokenizer)
    text = "".join(stream.push(token).text for token in tokens)
    assert len(stream._window) < 130
    assert text + stream.finish() == tokenizer.decode(tokens)


# ---- stop strings


@every_tokenizer
@given(
    text=st.text("aAb#\nE é😀", max_size=40),
    stops=st.lists(st.text("aAb#\nE é😀", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
)
def test_the_text_is_cut_before_the_stop_string_that_is_complete_first(
    tokenizer: ModelTokenizer, text: str, stops: list[str]
) -> None:
    deltas, stopped_by = streamed(tokenizer, tokenizer.encode(text).tolist(), stops)
    assert ("".join(deltas), stopped_by) == cut(text, stops)


@every_tokenizer
def test_the_beginning_of_a_stop_string_is_held_back(tokenizer: ModelTokenizer) -> None:
    stream = Detokenizer(tokenizer, ["</answer>"])
    so_far = ""
    for token in tokenizer.encode("x </answe z").tolist():
        so_far += stream.push(token).text
        assert not so_far.endswith(("<", "</", "</a", "</answe"))
    assert so_far + stream.finish() == "x </answe z"


def test_a_held_beginning_is_given_out_at_the_end() -> None:
    stream = Detokenizer(ByteTokenizer(), ["END"])
    assert [stream.push(ord(char)).text for char in "a EN"] == ["a", " ", "", ""]
    assert stream.finish() == "EN"


# ---- tokenizers


@every_tokenizer
@given(text=texts)
def test_the_bytes_of_the_tokens_make_up_the_text(tokenizer: ModelTokenizer, text: str) -> None:
    data = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text).tolist())
    prefix = (
        b" " if tokenizer is TOKENIZERS["sentencepiece"]() else b""
    )  # the one that it drops at the very front
    assert data.removeprefix(prefix) == text.encode()


def test_a_special_token_has_a_name_but_no_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_ids[0]
    assert tokenizer.is_hidden(end)
    assert token_text(tokenizer, end) == "<|end|>"
    assert tokenizer.decode([end]) == ""
    assert tokenizer.token_bytes(10**6) == b""


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "The dog"}]
    assert tokenizer.render_chat(messages, []) == "<|user|>The dog<|end|><|assistant|>"
    assert tokenizer.render_chat(messages, [], thinking=True).endswith("<think>")
    assert tokenizer.render_chat(messages, [], add_generation_prompt=False) == "<|user|>The dog<|end|>"
    tokens = tokenizer.encode_chat(tokenizer.render_chat(messages, [])).tolist()
    assert [token for token in tokens if tokenizer.is_hidden(token)] == [2, 1, 3]


def test_the_templates_own_error_message_is_kept() -> None:
    with pytest.raises(ChatTemplateFailed, match="Roles are system, user and assistant, not wizard"):
        byte_level().render_chat([{"role": "wizard", "content": "abra"}], [])


def test_the_template_of_a_processor_is_read(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert not HFTokenizer.load(str(tmp_path)).has_chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert HFTokenizer.load(str(tmp_path)).has_chat_template
    (tmp_path / "chat_template.json").write_text("[")
    assert not HFTokenizer.load(str(tmp_path)).has_chat_template


def test_a_model_without_a_template_names_the_remedy() -> None:
    with pytest.raises(ChatTemplateMissing, match="--chat-template"):
        sentencepiece().render_chat([{"role": "user", "content": "hi"}], [])


def test_a_tokenizer_is_loaded_from_a_models_directory(tmp_path: Any) -> None:
    saved = byte_level()._tokenizer
    saved.save_pretrained(tmp_path)
    loaded = HFTokenizer.load(str(tmp_path))
    assert loaded.encode("The dog sleeps 😀").tolist() == byte_level().encode("The dog sleeps 😀").tolist()
    assert loaded.eos_token_ids == byte_level().eos_token_ids
    messages = [{"role": "user", "content": "x"}]
    assert loaded.render_chat(messages, []) == byte_level().render_chat(messages, [])
    assert HFTokenizer.load(str(tmp_path), "{{ 'mine' }}").render_chat(messages, []) == "mine"


def test_a_directory_without_a_tokenizer_is_one_clear_error(tmp_path: Any) -> None:
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json"):
        HFTokenizer.load(str(tmp_path))


def test_a_truncation_saved_with_the_tokenizer_does_not_shorten_prompts() -> None:
    truncated = Tokenizer.from_str(byte_level()._tokenizer.backend_tokenizer.to_str())
    truncated.enable_truncation(4)
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=truncated, eos_token="<|end|>"))
    text = "The quick brown fox jumps"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


# ---- special tokens that are shown


@every_tokenizer
@given(parts=st.lists(texts, min_size=1, max_size=5))
def test_visible_special_tokens_stand_in_the_text_by_their_names(
    tokenizer: ModelTokenizer, parts: list[str]
) -> None:
    shown = tokenizer.eos_token_ids[0]
    prompt = tokenizer.encode("The").tolist()  # the space before the first word is kept
    tokens = [id for part in parts for id in (*tokenizer.encode(part).tolist(), shown)]
    stream = Detokenizer(tokenizer, context=prompt, visible=[shown])
    text = "".join(stream.push(token).text for token in tokens) + stream.finish()
    name = token_text(tokenizer, shown)
    space = " " if tokenizer is TOKENIZERS["sentencepiece"]() else ""
    assert text == "".join(f"{space if part else ''}{part}{name}" for part in parts)


def test_bytes_on_both_sides_of_a_visible_token_do_not_make_a_character() -> None:
    shown = ByteTokenizer.END
    stream = Detokenizer(ByteTokenizer(), visible=[shown])
    text = "".join(stream.push(token).text for token in (0xE2, 0x82, shown, 0xAC, ord("x")))
    assert text + stream.finish() == "\N{REPLACEMENT CHARACTER}<|end|>\N{REPLACEMENT CHARACTER}x"


def test_a_stop_string_may_hold_the_name_of_a_visible_token() -> None:
    stream = Detokenizer(ByteTokenizer(), ["b<|end|>"], visible=[ByteTokenizer.END])
    assert [stream.push(token).text for token in (ord("a"), ord("b"))] == ["a", ""]
    assert stream.push(ByteTokenizer.END).stopped_by == "b<|end|>"
