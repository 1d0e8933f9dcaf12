"""I8: prompt tokens computed of the `agents` workload, on the MLX runtime, the torch runtime and mlx-lm's server.

Eight agents with one system prompt of 1,536 words, six turns of 16 to 160 new words, 32 tokens out. The models are
tiny: one of full attention, one with recurrent states and one with sliding windows. All sides have the same weights
in float32, tokenizer and chat template; all answers are greedy and have 32 tokens, because the models cannot generate
an end (llamas.py).

  mlx, torch   `rootstock serve --runtime`, defaults but for dtype, device and the memory of its cache
  mlx-lm       `mlx_lm.server` with a prompt cache without a limit in practice, and once with its default of ten

Tokens computed are those of `usage`: prompt tokens less cached ones. The least possible is the work of a
cache that resumes at every token and forgets nothing. mlx-lm can be below it by one token for each earlier
answer: it decodes one step ahead, so that its cache has an answer's last token, too.

One request at a time, turn by turn over the agents, is the same load for every side. There the MLX runtime must
compute the same tokens as the torch runtime. Then all agents ask at once in each turn. Times, of the wall and of the
server's threads on the processors ("busy"), are only ratios of this CPU, where MLX has a slow BLAS: no figure of a
Mac follows from them. Both MLX sides run without compiled functions (MLX_DISABLE_COMPILE), because on a CPU each
would call a C++ compiler. A first short request is outside the time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from common import argument_parser, conclude, exactly
from llamas import say, write_chatting
from neighbours import busy_s_of
from peers import PeerProcess, free_port
from transformers import AutoTokenizer

from checkpoints import chat_fields
from least_possible import LeastPossible
from rootstock.bench.workloads import SIZES, Workload, as_text, make_workload

SHOW = "I8"
KV_BUDGET = "1GiB"
MODEL = "default_model"  # the name of mlx-lm's server for the model it was started with; ours takes any
KINDS = {"full": "llama", "states": "qwen3_next", "windows": "gemma3_text"}
LAYERS: dict[str, dict[str, Any]] = {
    # mlx-lm takes every sixth layer of Gemma 3 as one of full attention, with any configuration.
    "windows": {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_hidden_layers": 6},
}
UNLIMITED = ("--prompt-cache-size", "100000")
READY_WITHIN_S = 600.0  # also on a busy machine
WITHOUT_COMPILER = {"MLX_DISABLE_COMPILE": "1"}


@dataclass(frozen=True)
class Asked:
    prompt: np.ndarray  # [tokens]
    answer: np.ndarray  # [tokens]
    cached: int


@dataclass(frozen=True)
class Outcome:
    asked: list[Asked]  # in the order of turns, then of agents
    wall_s: float
    busy_s: float  # processor time of the server
    least: int

    @property
    def computed(self) -> int:
        return sum(len(request.prompt) - request.cached for request in self.asked)

    @property
    def ratio(self) -> float:
        return self.computed / self.least

    @property
    def answers(self) -> list[list[int]]:
        return [request.answer.tolist() for request in self.asked]


def save(kind: str, directory: Path) -> Path:
    """Saves a model that transformers and mlx-lm compute alike."""
    model_type, fields = chat_fields(kind)
    # Narrow weights: with wide ones the two differ by enough to choose another token here and there.
    own = {"vocab_size": 4096, "initializer_range": 0.05, "dtype": torch.float32}
    write_chatting(directory, model_type, **fields | LAYERS.get(kind, {}) | own)
    if kind == "states":
        # The hub's checkpoints have these names. mlx-lm does not read those that transformers 5 writes.
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config |= config.pop("rope_parameters")
        file.write_text(json.dumps(config, indent=2))
    return directory


# ---- sides


def rootstock(runtime: str, model: Path) -> PeerProcess:
    port = free_port()
    options = ["--port", str(port), "--runtime", runtime, "--dtype", "float32", "--kv-budget", KV_BUDGET]
    if runtime == "torch":
        options += ["--device", "cpu"]
    command = [sys.executable, "-m", "rootstock", "serve", str(model), *options]
    return PeerProcess(command, port, WITHOUT_COMPILER, "/health", READY_WITHIN_S)


def mlx_lm_server(model: Path, *options: str) -> PeerProcess:
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port), *options]
    return PeerProcess(command, port, WITHOUT_COMPILER, "/health", READY_WITHIN_S)


# ---- the load


def run(peer: PeerProcess, tokenizer: Any, workload: Workload, at_once: int) -> Outcome:
    conversations = [[{"role": "system", "content": as_text(each.prefix)}] for each in workload.conversations]
    asked: list[Asked] = []
    with peer, httpx.Client(base_url=peer.url, timeout=600, trust_env=False) as client:

        def ask(messages: list[dict[str, str]]) -> Asked:
            body = {"model": MODEL, "messages": messages, "max_tokens": workload.sizes.answer_tokens}
            answered = client.post("/v1/chat/completions", json=body | {"temperature": 0})
            assert answered.status_code == 200, answered.text
            usage = answered.json()["usage"]
            # mlx-lm strips the blank that each word has before it, also the first one; its cache has the token.
            text = " " + answered.json()["choices"][0]["message"]["content"].lstrip()
            prompt, answer = prompt_of(tokenizer, messages), tokens_of(tokenizer, text)
            assert usage["prompt_tokens"] == len(prompt), (usage, len(prompt))
            assert usage["completion_tokens"] == len(answer) == workload.sizes.answer_tokens, (usage, text)
            messages.append({"role": "assistant", "content": text})
            return Asked(prompt, answer, usage["prompt_tokens_details"]["cached_tokens"])

        first = ask([{"role": "user", "content": "hello"}])
        began, busy_s = time.monotonic(), busy_s_of(peer.pid)
        with ThreadPoolExecutor(at_once) as agents:
            for turn in range(workload.sizes.turns):
                for messages, conversation in zip(conversations, workload.conversations, strict=True):
                    messages.append({"role": "user", "content": as_text(conversation.turns[turn].new)})
                asked += agents.map(ask, conversations)
        wall_s, busy_s = time.monotonic() - began, busy_s_of(peer.pid) - busy_s
    return Outcome(asked, wall_s, busy_s, least_possible(first, asked))


def prompt_of(tokenizer: Any, messages: list[dict[str, str]]) -> np.ndarray:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokens_of(tokenizer, text)


def tokens_of(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)


def least_possible(first: Asked, asked: list[Asked]) -> int:
    """Counts the fewest tokens that a cache could compute after the first request.

    The order within a turn changes nothing: behind the system prompt, which every order computes once, agents have
    no tokens in common.
    """
    least = LeastPossible()
    for request in [first, *asked]:
        least.asked(request.prompt)
        least.answered(np.concatenate([request.prompt, request.answer]))
        if request is first:
            least.forget_costs()
    return least.tokens


# ---- the comparison


def measure(kind: str, model: Path, workload: Workload) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def of(name: str, make: Callable[[], PeerProcess], at_once: int) -> Outcome:
        outcome = run(make(), tokenizer, workload, at_once)
        say(
            f"{kind:8} {at_once} at once  {name:18} {outcome.computed:7,} of {outcome.least:6,} tokens  "
            f"{outcome.ratio:7.4f}  {outcome.wall_s:6.1f} s, busy {outcome.busy_s:6.1f} s"
        )
        return outcome

    figures: dict[str, Any] = {}
    for at_once in (1, workload.sizes.at_once):
        ours = of("mlx", lambda: rootstock("mlx", model), at_once)
        theirs = of("mlx-lm", lambda: mlx_lm_server(model, *UNLIMITED), at_once)
        by_torch = of("torch", lambda: rootstock("torch", model), at_once)
        prefix = f"{kind}_{'one' if at_once == 1 else 'all'}_at_once"
        figures |= {
            f"{prefix}_least": ours.least,
            f"{prefix}_mlx": round(ours.ratio, 4),
            f"{prefix}_torch": round(by_torch.ratio, 4),
            f"{prefix}_mlx_lm": round(theirs.ratio, 4),
            f"{prefix}_difference_to_torch": ours.computed - by_torch.computed,
            f"{prefix}_other_answers_than_torch": differences(ours, by_torch),
            f"{prefix}_other_answers_than_mlx_lm": differences(ours, theirs),
            f"{prefix}_mlx_lm_wall_times_ours": round(theirs.wall_s / ours.wall_s, 3),
            f"{prefix}_mlx_lm_busy_times_ours": round(theirs.busy_s / ours.busy_s, 3),
        }
    by_default = of("mlx-lm, 10 caches", lambda: mlx_lm_server(model), 1)
    return figures | {f"{kind}_one_at_once_mlx_lm_by_default": round(by_default.ratio, 4)}


def differences(one: Outcome, other: Outcome) -> int:
    return sum(a != b for a, b in zip(one.answers, other.answers, strict=True))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of models, comma-separated")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the lengths of prompts")
    given = parser.parse_args()
    workload = make_workload("agents", 0, SIZES["agents"].scaled(given.scale))
    figures: dict[str, Any] = {}
    bars = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.only.split(","):
            figures |= measure(kind, save(kind, Path(folder) / kind), workload)
            bars[f"{kind}_one_at_once_difference_to_torch"] = exactly(0)
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
