"""Answers of random logits under a constraint."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.sampling import Sampler
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.constraints.asked import Constraint, Grammar
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.constraints.progress import AnswerProgress, Masked
from rootstock.text.detokenizer import Detokenizer
from rootstock.text.tokenizer import HFTokenizer, ModelTokenizer

BYTES = ByteTokenizer()
VOCAB = 300  # more logits than the tokenizer has tokens
PROMPT = "Say: "


def byte_compiler() -> ConstraintCompiler:
    return ConstraintCompiler(BYTES, VOCAB, BYTES.eos_token_ids)


def compiled(grammar: Grammar, **constraint: object) -> CompiledConstraint:
    return byte_compiler().compile(Constraint(grammar, **constraint))  # type: ignore[arg-type]


def accepts(constraint: CompiledConstraint, text: bytes) -> bool:
    """Returns whether this text, written byte by byte, is a whole answer."""
    progress, tokens = AnswerProgress(constraint), list(text)
    if progress.agreeing(tokens) < len(tokens):
        return False
    for token in tokens:
        progress.accept(token)
    restriction = progress.restriction()
    assert isinstance(restriction, Masked)
    return restriction.may_end


def random_answer(
    constraint: CompiledConstraint,
    tokenizer: ModelTokenizer,
    vocab_size: int,
    ends: tuple[int, ...],
    seed: int,
    most: int = 400,
    temperature: float = 1.0,
) -> tuple[str, bool]:
    """Returns the text after the prompt, and whether it ended by itself."""
    logits = np.random.default_rng(seed)
    prompt = tokenizer.encode(PROMPT)
    detokenizer = Detokenizer(tokenizer, context=prompt)
    progress = AnswerProgress(constraint)
    sampling = ResolvedSampling(temperature=temperature)
    sampler = Sampler(sampling, prompt, vocab_size, seed, ends, progress=progress)
    text = ""
    for _ in range(most):
        token = sampler.sample(logits.normal(size=vocab_size).astype(np.float32)).token
        if token in ends:
            return text + detokenizer.finish(), True
        text += detokenizer.push(token).text
        if progress.is_complete:
            return text + detokenizer.finish(), True
    return text + detokenizer.finish(), False


def _wrapped(tokenizer: Tokenizer, vocabulary: int) -> tuple[HFTokenizer, int]:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    return HFTokenizer(wrapped), vocabulary


_PIECES = [
    "a", "b", "c", "yes", "no", "{", "}", "[", "]", '"', ":", ",", "1", "2", "10", '{"', '":', "true", "null", "é",
]  # fmt: skip
_ASCII = [chr(code) for code in range(ord("!"), ord("~") + 1)]
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def metaspace() -> tuple[HFTokenizer, int]:
    """Unigram pieces with a mark for the space before a word, and bytes for everything else."""
    words = [*dict.fromkeys([*_PIECES, *_ASCII]), *(f"\u2581{piece}" for piece in _PIECES), "\u2581"]
    pieces = ["<unk>", "<s>", "</s>", *_BYTE_PIECES, *words]
    scores = [(piece, -1.0 - (id % 7)) for id, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrapped(tokenizer, len(pieces))


def word_level() -> tuple[HFTokenizer, int]:
    """Whole words, between which decoding writes spaces."""
    pieces = ["<unk>", "</s>", *_PIECES]
    tokenizer = Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return _wrapped(tokenizer, len(pieces))
