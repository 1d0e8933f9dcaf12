"""Tokens as grammars see them decode to the text that grammars allow."""

from __future__ import annotations

import json
import re

import pytest

from checkpoints import CHAT_VOCAB, chat_tokenizer
from rootstock.errors import Unsupported
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.constraints.asked import Choice, Constraint, Grammar, JsonSchema, Lark, Regex
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.constraints.progress import AnswerProgress, Masked
from rootstock.text.constraints.vocabulary import Vocabulary
from rootstock.text.tokenizer import HFTokenizer, ModelTokenizer
from text.constraints.helpers import BYTES, VOCAB, metaspace, random_answer, word_level

SCHEMA = JsonSchema(
    json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"enum": ["yes", "no", "é"]},
                "b": {"type": "array", "items": {"enum": [1, 2]}},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )
)


def byte_level() -> tuple[HFTokenizer, int]:
    return HFTokenizer(chat_tokenizer()), CHAT_VOCAB


KINDS = {"byte-level BPE": byte_level, "metaspace": metaspace}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 37])
def test_random_answers_decode_to_text_of_the_grammar(kind: str, padding: int) -> None:
    tokenizer, vocabulary = KINDS[kind]()
    size = vocabulary + padding
    compiler = ConstraintCompiler(tokenizer, size, tokenizer.eos_token_ids)

    def answers(grammar: Grammar) -> list[str]:
        constraint = compiler.compile(Constraint(grammar))
        found = [
            random_answer(constraint, tokenizer, size, tokenizer.eos_token_ids, seed) for seed in range(12)
        ]
        return [text for text, ended in found if ended]

    for text in (found := answers(SCHEMA)):
        value = json.loads(text)
        assert value["a"] in ("yes", "no", "é")
        assert set(value["b"]) <= {1, 2}
    assert found
    assert all(re.fullmatch("(yes|no é){1,3}", text) for text in answers(Regex("(yes|no é){1,3}")))
    chosen = set(answers(Choice(("yes", "a b", " no", "naïve \U0001f600"))))
    assert chosen <= {"yes", "a b", " no", "naïve \U0001f600"}
    assert len(chosen) > 1


def test_tokens_of_whole_words_cannot_be_constrained() -> None:
    tokenizer, size = word_level()
    compiler = ConstraintCompiler(tokenizer, size, tokenizer.eos_token_ids)
    compiler.prepare()
    with pytest.raises(Unsupported, match="no token for the character"):
        compiler.compile(Constraint(Regex("yes")))


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_is_tokenized_as_the_model_does_and_exactly(kind: str) -> None:
    tokenizer, size = KINDS[kind]()
    vocabulary = Vocabulary(tokenizer, size, tokenizer.eos_token_ids)
    for text in ("yes", ' {"a": [1, 10]}', "é", "<|im_end|>", "a</s>b", ""):
        assert vocabulary.bytes_of(vocabulary.encode(text.encode())) == text.encode()
    half = "é".encode()[:1]
    assert vocabulary.bytes_of(vocabulary.encode(half)) == half


def test_end_tokens_and_special_tokens_are_no_text() -> None:
    tokenizer: ModelTokenizer = BYTES
    vocabulary = Vocabulary(tokenizer, VOCAB, (200, BYTES.END))
    assert vocabulary.pieces[BYTES.END] == b"\xff<|end|>"
    assert vocabulary.pieces[200] == b"\xff\xc8", "an end of the answer, although it has text"
    assert vocabulary.pieces[VOCAB - 1] == b"", "a padded logit"
    assert vocabulary.encode_marker("<|tool|>x") == (256 + BYTES.SPECIAL.index("<|tool|>"), ord("x"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 1, 2, 37, 400])
def test_a_control_token_of_a_grammar_comes_whole_whatever_logits_have_no_token(
    kind: str, padding: int
) -> None:
    tokenizer, vocabulary = KINDS[kind]()
    size = vocabulary + padding
    name = {"byte-level BPE": "<|im_start|>", "metaspace": "<s>"}[kind]
    [control] = [id for id in range(vocabulary) if tokenizer.token_bytes(id) == name.encode()]
    compiler = ConstraintCompiler(tokenizer, size, tokenizer.eos_token_ids)
    for grammar in (
        f"start: {name} /[ab]/",
        f"start: {name}+ /[ab]/",
        f"start: (/x/ | <[{control}]>) /[ab]/",
    ):
        constraint = compiler.compile(Constraint(Lark(grammar)))
        for seed in range(8):
            text, ended = random_answer(constraint, tokenizer, size, tokenizer.eos_token_ids, seed)
            assert ended
            assert text.strip() in ("a", "b", "xa", "xb")


def test_no_name_of_a_control_token_is_the_beginning_of_a_number() -> None:
    class Numbered(ByteTokenizer):
        SPECIAL = (*ByteTokenizer.SPECIAL, "[", "[25", "[257]", "")
        vocab_size = 256 + len(SPECIAL)

    tokenizer = Numbered()
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    constraint = compiler.compile(Constraint(Lark("start: (<[258]> | /x/) /[ab]/")))
    restriction = AnswerProgress(constraint).restriction()
    assert isinstance(restriction, Masked)
    assert (~restriction.forbidden).nonzero()[0].tolist() == [ord("x"), 258]
