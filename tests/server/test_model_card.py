"""The summary of a loaded model, and `rootstock models check`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embedding_models import save_embedding_model
from gguf_checkpoints import save_gguf
from rootstock.cache.families import ChunkedAttention, FullAttention, RecurrentState, SlidingWindow
from rootstock.cli import main as command
from rootstock.runtime.base import ModelDescription
from rootstock.runtime.gguf_files import stands_for_gguf
from rootstock.server.models.model_card import (
    bytes_per_checkpoint,
    bytes_per_token,
    families_in_words,
    numbers_of,
    table_of,
)
from rootstock.units import in_units

FULL = FullAttention(layers=1, bytes_per_token=100)
WINDOW = SlidingWindow(layers=3, bytes_per_token=10, window=9)
CHUNKS = ChunkedAttention(layers=2, bytes_per_token=1, chunk=8)
STATE = RecurrentState(layers=2, bytes_per_state=5000)


def test_bytes_of_a_token_and_of_a_checkpoint() -> None:
    assert bytes_per_token((FULL, WINDOW, STATE)) == 110
    assert bytes_per_checkpoint((FULL,), 4) == 0
    assert bytes_per_checkpoint((FULL, STATE), 4) == 5000
    # Eight positions before the query touch three blocks of four at most, and so do seven of a chunk.
    assert bytes_per_checkpoint((WINDOW,), 4) == 3 * 4 * 10
    assert bytes_per_checkpoint((CHUNKS, STATE), 4) == 3 * 4 + 5000
    assert bytes_per_checkpoint((SlidingWindow(1, 10, window=1),), 4) == 0
    for start in range(40):  # the bound, by counting
        blocks = (start + 8 - 1) // 4 - start // 4 + 1
        assert blocks * 4 * 10 <= bytes_per_checkpoint((WINDOW,), 4)


def test_the_summary_has_the_execution_mode_its_reason_and_every_family() -> None:
    description = ModelDescription(
        name="m", architecture="A", vocab_size=10, context_limit=4096, families=(FULL, STATE),
        weights_fingerprint="w", dtype="bfloat16", kv_dtype="bfloat16", device="cpu", parameters=1234,
        rope_regime="longrope<=4096", execution_mode="one sequence per forward", mode_reason="its layers ask for it",
        runtime="mlx",
    )  # fmt: skip
    numbers = numbers_of(description, 16)
    assert (numbers["runtime"], numbers["execution_mode"]) == ("mlx", "one sequence per forward")
    assert (numbers["speculation"], numbers["speculation_reason"]) == ("ngram", "")
    assert numbers_of(description, 16, "not asked for")["speculation_reason"] == "not asked for"
    assert numbers["families"] == [
        {"name": "full", "layers": 1, "bytes_per_token": 100},
        {"name": "state", "layers": 2, "bytes_per_state": 5000},
    ]
    assert (numbers["bytes_per_token"], numbers["bytes_per_checkpoint"]) == (100, 5000)
    rows = table_of(description, 16)
    assert ("runs", "one sequence per forward: its layers ask for it") in rows
    assert ("layers", "state × 2 layers, 4.9 KiB per state") in rows
    assert ("RoPE", "longrope<=4096") in rows
    assert ("runtime", "mlx") in rows
    assert families_in_words(description.families) == "full × 1 layer + state × 2 layers"
    assert in_units(1023) == "1,023 bytes"


CHECK = ("models", "check", "--dtype", "float32", "--device", "cpu")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rootstock", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_models_check_prints_a_table_for_a_model_that_can_be_served(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *CHECK, str(checkpoint)) == 0
    out = capsys.readouterr().out
    for line in (
        f"model           {checkpoint.name}",
        "runtime         torch",
        "runs            packed",
        "layers          full × 2 layers, 512 bytes per token",
        "per checkpoint  none needed: it resumes anywhere",
        "context limit   512 tokens",
        "dtype           float32, cache in float32, on cpu",
    ):
        assert line in out.splitlines()
    assert re.search(r"^weights +safetensors \(F32\), [\d.]+ .iB; [\d.]+ .iB in memory$", out, re.MULTILINE)
    assert re.search(r"^longest +512 tokens: a pool of [\d.]+ .iB has [\d,]+$", out, re.MULTILINE)
    assert re.search(r"^answers +a chat of \d+ tokens with \d+: ['\"]", out, re.MULTILINE)


def test_models_check_names_the_types_of_a_gguf_file_and_pull_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, _ = save_gguf(tmp_path, "llama", lambda name: "Q8_0")
    assert run(monkeypatch, *CHECK, str(file)) == 0
    assert re.search(r"^weights +GGUF \(Q8_0, F32\), ", capsys.readouterr().out, re.MULTILINE)
    assert run(monkeypatch, "pull", str(file)) == 0
    assert stands_for_gguf(Path(capsys.readouterr().out.strip()))
    assert run(monkeypatch, "pull", f"{tmp_path}:Q2_K") == 2
    assert "not one is Q2_K" in capsys.readouterr().err


def without_tokenizer(copy: Path) -> list[str]:
    (copy / "tokenizer.json").unlink()
    return []


def with_template_of_a_wrong_syntax(copy: Path) -> list[str]:
    (copy / "chat_template.jinja").write_text("{% for")
    return []


def with_template_that_refuses(copy: Path) -> list[str]:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no chats today') }}")
    return []


def with_option_of_a_template(copy: Path) -> list[str]:
    (copy / "other.jinja").write_text("{{ raise_exception('no chats today') }}")
    return ["--chat-template", str(copy / "other.jinja")]


# Each way in which a server with the same files and options could not answer, and a part of the line that says so.
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_tokenizer, "no usable tokenizer"),
        (with_template_of_a_wrong_syntax, "The chat template of"),
        (with_template_that_refuses, "a chat fails: The model's chat template refuses these messages"),
        (with_option_of_a_template, "no chats today"),
        (lambda copy: ["--tool-parser", "morse"], "--tool-parser"),
        (lambda copy: ["--kv-budget", "2KiB"], "--kv-budget is 2.0 KiB, but at least"),
        (lambda copy: ["--kv-budget", "many"], "--kv-budget"),
        (lambda copy: ["--context-limit", "1000000"], "--context-limit"),
        (lambda copy: ["--adapter", f"a={copy}"], "LoRA adapter 'a'"),
        (lambda copy: ["--block-size", "0"], "--block-size"),
    ],
)
def test_models_check_tries_all_that_a_server_needs(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], list[str]],
    said: str,
) -> None:
    assert run(monkeypatch, *CHECK, str(copy), *spoil(copy)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err


def test_models_check_completes_a_text_where_there_is_no_chat_template(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "chat_template.jinja").unlink()
    assert run(monkeypatch, *CHECK, str(copy)) == 0
    assert re.search(
        r"^answers +a completion of 5 tokens with \d+: ['\"]", capsys.readouterr().out, re.MULTILINE
    )


def test_models_check_describes_an_embedding_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_embedding_model(tmp_path / "tiny")
    checked = ["models", "check", str(directory), "--dtype", "float32", "--device", "cpu"]
    assert run(monkeypatch, *checked) == 0
    table = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert table["embeddings"].strip() == "32 dimensions, pooling mean"
    assert table["input"].strip() == "at most 48 tokens"


def test_models_check_prints_one_line_for_a_refused_model_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert run(monkeypatch, "models", "check", str(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("rootstock: ")
    assert "Traceback" not in err
    assert run(monkeypatch, "models", "check", str(tmp_path), "--block-size", "0") == 2
    assert "--block-size" in capsys.readouterr().err
