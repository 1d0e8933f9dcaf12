"""I2: 24 small checkpoints saved by mlx-lm, loaded by the real loader and served over HTTP: answers of mlx-lm.

Each checkpoint, with its tokenizer, is written by mlx-lm's own functions and served by `rootstock serve --runtime
mlx` with a disk tier, in a process of its own. Two chats with the same long system prompt are asked, cold and then
warm. The server ends, a second one starts with the same directory, and both chats are asked again. Every greedy
answer must have the tokens of mlx_lm's `stream_generate`. After the restart, prompt tokens must come from the disk.

Six further checkpoints are quantized by mlx-lm: to 4 bits, to 8 bits, and to a mixture of 4, 8 and none. Their
answers may part from mlx-lm's where its own logits nearly tie: at the first different token the two logits differ
by at most eight times the model's own noise, which is the change of its logits by one more rounding of its embedded
tokens.

`--only llama,mamba2` runs a few.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import argument_parser, at_least, conclude, exactly
from mlx_lm import load, stream_generate
from peers import PeerProcess, free_port

from rootstock.runtime.mlx.self_check import noise, own_logits
from rootstock.runtime.trial import largest_difference
from twins import mlx_models

CHECKPOINTS = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "gemma", "cohere", "olmo2", "starcoder2"),
    *("gpt_neox", "gpt2", "granite", "glm4", "deepseek_v3", "minicpm3"),
    *("gemma3_text", "gpt_oss", "cohere2", "llama4"),
    *("qwen3_next", "mamba2", "lfm2", "nemotron_h"),
)
QUANTIZED = (
    ("llama", 4),
    ("llama", 8),
    ("qwen3_moe", 4),
    ("gemma3_text", 8),
    ("qwen3_next", 4),
    ("llama", 0),
)
ANSWER_TOKENS = 24
NOISES = 8
SYSTEM = "You keep the records of a small library. Answer briefly, and name the shelf of each book that you mention."
QUESTIONS = (
    "Which books on winter gardens do we have?",
    "Who borrowed the atlas of rivers last summer, and when?",
)


@dataclass
class Measured:
    name: str
    equal: dict[str, int] = field(default_factory=dict)  # answers, by state of the server
    near_ties: int = 0
    other: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    failed: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return not self.failed and not self.other and self.cached.get("restarted", 0) > 0

    def __str__(self) -> str:
        if self.failed:
            return f"{self.name:22} FAILED: {self.failed}"
        equal = ", ".join(f"{state} {count}/{len(QUESTIONS)}" for state, count in self.equal.items())
        return f"{self.name:22} equal: {equal}; near ties {self.near_ties}; cached {self.cached}; {self.seconds} s"


def mixed(path: str, module: nn.Module) -> bool | dict[str, Any]:
    """Returns how a layer of a mixed checkpoint is quantized: the first one not, embeddings and head in 8 bits."""
    if ".layers.0." in path:
        return False
    return {"group_size": 32, "bits": 8} if "embed" in path or "head" in path else True


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


class Expected:
    """Answers of mlx-lm alone, as the bytes of their tokens."""

    def __init__(self, directory: Path) -> None:
        self.model, self._tokenizer = load(str(directory))
        vocabulary = mlx_models.byte_tokenizer().get_vocab()
        self._texts = {id: piece for piece, id in vocabulary.items()}
        self.prompts = [
            np.array(self._tokenizer.apply_chat_template(messages(q), add_generation_prompt=True), np.int32)
            for q in QUESTIONS
        ]
        self.answers = [self._answer(prompt) for prompt in self.prompts]
        self._noise: float | None = None

    def _answer(self, prompt: np.ndarray) -> list[int]:
        pieces = stream_generate(self.model, self._tokenizer, prompt.tolist(), max_tokens=ANSWER_TOKENS)
        return [piece.token for piece in pieces if piece.token not in self._tokenizer.eos_token_ids]

    def near_tie(self, prompt: np.ndarray, ours: Sequence[int], theirs: Sequence[int]) -> bool:
        """Returns whether mlx-lm's logits of the first different tokens differ by no more than its noise."""
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return False
        tokens = np.concatenate([prompt, np.array(theirs[:at], np.int32)])
        row = own_logits(self.model, tokens, len(prompt))[-1]
        if self._noise is None:
            self._noise = noise(self.model, prompt, "float32", largest_difference)
        return bool(abs(row[ours[at]] - row[theirs[at]]) <= NOISES * self._noise * row.std())


def ids_of(tokens: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the ids of an answer's logprobs: each token of the tokenizer is a byte, or a special one."""
    vocabulary = mlx_models.byte_tokenizer().get_vocab()
    pieces = {bytes([byte]): vocabulary[piece] for byte, piece in _byte_pieces().items()}
    special = {name.encode(): vocabulary[name] for name in mlx_models.SPECIAL}
    known = pieces | special
    return [known[bytes(token["bytes"])] for token in tokens]


def _byte_pieces() -> dict[int, str]:
    """Returns the piece of each byte in byte-level vocabularies (GPT-2): printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def ask(url: str, question: str) -> tuple[list[int], int]:
    body = {"messages": messages(question), "temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": True}
    body["model"] = "any"
    answer = (
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600, trust_env=False)
        .raise_for_status()
        .json()
    )
    content = answer["choices"][0]["logprobs"]["content"] or []
    return ids_of(content), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def server(directory: Path, disk: Path) -> PeerProcess:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "rootstock",
        "serve",
        str(directory),
        "--runtime",
        "mlx",
        "--port",
        str(port),
    ]
    command += ["--dtype", "float32", "--kv-budget", "64MiB", "--block-size", "8", "--chunk-tokens", "64"]
    command += ["--disk-dir", str(disk), "--disk-budget", "256MiB"]
    # On a CPU, MLX would call a C++ compiler for each function.
    return PeerProcess(command, port, {"MLX_DISABLE_COMPILE": "1"}, ready_path="/health", ready_within_s=600)


def measure(name: str, bits: int | None = None) -> Measured:
    label = name if bits is None else f"{name}, {f'{bits} bits' if bits else 'mixed'}"
    measured, began = Measured(label), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory, disk = Path(folder) / "model", Path(folder) / "disk"
        try:
            if bits is None:
                mlx_models.save(directory, name)
            else:
                mlx_models.save(directory, name, bits=bits or 4, predicate=None if bits else mixed)
            expected = Expected(directory)
            with server(directory, disk) as peer:
                compare(measured, "cold", peer.url, expected, bits)
                compare(measured, "warm", peer.url, expected, bits)
            with server(directory, disk) as peer:
                compare(measured, "restarted", peer.url, expected, bits)
        except Exception as error:  # the others are measured, too
            measured.failed = f"{type(error).__name__}: {error}"[:600]
    measured.seconds = round(time.monotonic() - began, 1)
    return measured


def compare(measured: Measured, state: str, url: str, expected: Expected, bits: int | None) -> None:
    measured.equal[state] = measured.cached[state] = 0
    for question, prompt, theirs in zip(QUESTIONS, expected.prompts, expected.answers, strict=True):
        ours, cached = ask(url, question)
        measured.cached[state] += cached
        if ours == theirs:
            measured.equal[state] += 1
        elif bits is not None and expected.near_tie(prompt, ours, theirs):
            measured.near_ties += 1
        else:
            measured.other.append(f"{state}: {ours} instead of {theirs}")


def main() -> None:
    mx.disable_compile()
    parser = argument_parser(__doc__)
    parser.add_argument("--only", help="checkpoints, comma-separated")
    only = parser.parse_args().only
    wanted: list[tuple[str, int | None]] = [*((name, None) for name in CHECKPOINTS), *QUANTIZED]
    if only:
        wanted = [each for each in wanted if each[0] in only.split(",")]
    began, plain, quantized = time.monotonic(), [], []
    for name, bits in wanted:
        measured = measure(name, bits)
        (plain if bits is None else quantized).append(measured)
        print(measured, *measured.other, sep="\n   ", flush=True)
    figures = {
        "right": sum(m.is_right for m in plain),
        "quantized_right": sum(m.is_right for m in quantized),
        "near_ties": sum(m.near_ties for m in quantized),
        "not_right": {
            m.name: m.failed or m.other[:1] or json.dumps(m.cached)
            for m in plain + quantized
            if not m.is_right
        },
        "seconds": round(time.monotonic() - began, 1),
    }
    bars = {
        "right": at_least(len(plain)),
        "quantized_right": at_least(len(quantized)),
        "not_right": exactly({}),
    }
    conclude("I2", figures, bars)


if __name__ == "__main__":
    main()
