"""The small model: made once, whole or not at all, the same every time, and good for a chat with tools."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from rootstock.bench.scenario import AGENTS, TOOLS, add_step, first_messages
from rootstock.bench.tiny_model import (
    CHAT_TEMPLATE,
    DEMO_SPEC,
    TinyModelSpec,
    ensure_tiny_model,
)
from rootstock.errors import ChatTemplateFailed
from rootstock.runtime.model_files import user_cache_folder
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import template_input
from rootstock.text.output.detect import detect
from rootstock.text.tokenizer import HFTokenizer
from text.output.templates import TemplateTokenizer

SMALL = TinyModelSpec(
    vocab_size=600, hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, corpus_lines=200
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ensure_tiny_model(SMALL, folder)
    return folder


def made(folder: Path) -> tuple[Path, list[str]]:
    told: list[str] = []
    return ensure_tiny_model(SMALL, folder, told.append), told


def test_a_model_that_is_there_is_used_again(folder: Path) -> None:
    path, told = made(folder)
    assert not told
    assert [each.name for each in folder.iterdir()] == [path.name]


def test_one_spec_makes_one_model_to_the_byte(folder: Path, tmp_path: Path) -> None:
    first, second = ensure_tiny_model(SMALL, folder), ensure_tiny_model(SMALL, tmp_path)
    for file in first.iterdir():
        assert _digest(file) == _digest(second / file.name), file.name


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_broken_model_is_made_anew(folder: Path, file: str) -> None:
    path, _ = made(folder)
    whole = _digest(path / file)
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[: len(content) // 2])
    _, told = made(folder)
    assert told
    assert _digest(path / file) == whole


def test_a_model_with_a_missing_file_is_made_anew(folder: Path) -> None:
    path, _ = made(folder)
    (path / "generation_config.json").unlink()
    _, told = made(folder)
    assert told
    assert (path / "generation_config.json").exists()


def test_another_spec_is_another_directory() -> None:
    assert replace(SMALL, seed=1).directory_name != SMALL.directory_name
    assert DEMO_SPEC.directory_name != SMALL.directory_name


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "rootstock"


def test_a_conversation_only_grows_at_its_end(folder: Path) -> None:
    model_tokenizer = HFTokenizer.load(str(made(folder)[0]))
    for agent in AGENTS:
        messages, before = first_messages(), ""
        for step in agent.steps:
            add_step(messages, step)
            template = template_input(conversation_of(messages, TOOLS), model_tokenizer)
            rendered = template.render(model_tokenizer)
            assert rendered.startswith(before)
            assert rendered.endswith("<|assistant|>\n")
            before = rendered + "an answer"
            messages.append({"role": "assistant", "content": "an answer"})


def test_text_survives_the_tokenizer(folder: Path) -> None:
    model_tokenizer = HFTokenizer.load(str(made(folder)[0]))
    text = "Straße, 東京, 🌱 and\ttabs\n"
    assert model_tokenizer.decode(model_tokenizer.encode(text).tolist()) == text


def test_special_tokens_are_single_hidden_and_end_an_answer(folder: Path) -> None:
    model_tokenizer = HFTokenizer.load(str(made(folder)[0]))
    (end,) = model_tokenizer.encode_chat("<|turn_end|>").tolist()
    assert model_tokenizer.is_hidden(end)
    assert model_tokenizer.eos_token_ids == (end,)


def test_an_unknown_role_is_refused(folder: Path) -> None:
    model_tokenizer = HFTokenizer.load(str(made(folder)[0]))
    with pytest.raises(ChatTemplateFailed, match="no role oracle"):
        model_tokenizer.render_chat([{"role": "oracle", "content": "?"}], ())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_template_writes_calls_in_a_known_format() -> None:
    assert detect(TemplateTokenizer(CHAT_TEMPLATE)).name == "hermes"
