"""P1: drafts of the model's own heads: the same answers, the same hits, and more tokens a second.

Three models of different kinds are trained for a few minutes on the demo's text, byte by byte, and a head behind
each: a hybrid of recurrent states (Qwen3-Next's), latents (DeepSeek V3's), experts over plain K and V (GLM 4.5's).

*Same*: conversations of four turns, cold, again, and after a restart from disk, with the head and without: the
same tokens, and as many of each prompt found.

*Schedules*: requests that arrive, stop, are aborted and preempted at random times in a memory that is too small, some
of them sampled with a seed. Drafts cost nothing there, so that every step has some, and a third of them is wrong.
Each answer is compared with the one that the request has alone, without a head.

*Speed*: tokens a second of one and of eight requests: without drafts, with drafts by lookup, and with the head.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, conclude, exactly
from llamas import say
from numpy.typing import NDArray
from torch import nn
from trained_tiny import LEARNING_RATE, VOCAB, text_tokens
from transformers import AutoConfig, AutoModelForCausalLM

from draft_checkpoints import name_head, names_of, with_head_layer
from engine.helpers import Bench, Client
from rootstock.config import ModelConfig, TierConfig
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import Finished, StopParams
from rootstock.engine.speculation.heads import HeadProposer
from rootstock.runtime.base import Batch, DraftHeads
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.torch.draft_heads import DraftHead, HeadedDecoder
from rootstock.runtime.torch.runner import TorchRuntime, load_model

SHOW = "P1"
LAYERS = 8
TOKENS, SEQUENCES, STEPS = 128, 12, 400
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_EXPERTS,
        "head_dim": 64,
        "num_experts": 4,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "glm4_moe": {
        **_EXPERTS,
        "head_dim": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    },
}


def train(model_type: str, directory: Path, steps: int = STEPS) -> Path:
    """Trains a model and a head behind it. Saves both under the names of real checkpoints."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **{**_COMMON, **MODELS[model_type], **with_head_layer(model_type, LAYERS)}
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    names, decoder, width = names_of(model_type), model.get_decoder(), config.hidden_size
    layers = decoder.layers
    block, decoder.layers = layers[LAYERS], layers[:LAYERS]
    config.num_hidden_layers = LAYERS
    norm = type(block.input_layernorm)
    parts = {
        part: nn.Linear(2 * width, width, bias=False) if part == names.projection else norm(width, eps=1e-6)
        for part in names.parts
    }
    headed = HeadedDecoder(model, DraftHead(names, LAYERS, block, list(parts.values())))
    text = text_tokens(1, 400_000)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE / 2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE / 2, total_steps=steps, pct_start=0.1
    )
    picks, losses, began = torch.Generator().manual_seed(2), [], time.monotonic()
    for _ in range(steps):
        starts = torch.randint(0, len(text) - TOKENS, (SEQUENCES,), generator=picks)
        batch = torch.stack([text[start : start + TOKENS] for start in starts.tolist()])
        hidden = decoder(batch, use_cache=False)[0]
        own = nn.functional.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1].detach()], 1)
        positions = torch.arange(TOKENS)[None]
        losses_of_head, kept = [], before
        for _ in range(2):  # the second from the head's own hidden state
            kept = headed._rows(decoder.embed_tokens(batch), kept, positions, None)
            guessed = model.lm_head(kept[:, :-1]).flatten(0, 1)
            losses_of_head.append(nn.functional.cross_entropy(guessed, batch[:, 1:].flatten()))
            kept = torch.cat([torch.zeros_like(kept[:, :1]), kept[:, :-1]], 1)
        optimizer.zero_grad()
        (own + losses_of_head[0] + 0.3 * losses_of_head[1]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append((float(own.detach()), float(losses_of_head[0].detach())))
    mean = np.mean(losses[-20:], 0)
    say(
        f"{model_type}: {mean[0]:.2f} nats a byte, {mean[1]:.2f} by the head, {time.monotonic() - began:.0f} s"
    )
    del decoder.draft_head
    decoder.layers, config.num_hidden_layers = layers, LAYERS + 1
    model.eval().save_pretrained(directory)
    return name_head(directory, names, {part: module.weight.detach() for part, module in parts.items()})


def load(directory: Path, threads: int, *, heads: bool) -> TorchRuntime:
    config = ModelConfig(str(directory), device="cpu", dtype="float32", threads=threads)
    return load_model(config, demands=Demands(draft_heads=heads))


def serve(runtime: TorchRuntime, blocks: int = 2000, **options: Any) -> Bench:
    """Serves a loaded model from an empty cache, with drafts of any source unless the options say otherwise."""
    fresh = TorchRuntime(runtime._model, runtime._served, decoder=runtime._decoder)
    settings: dict[str, Any] = {"draft_tokens": None, "idle_work": False, "max_session_wait_s": 0.0}
    return Bench(blocks, 16, runtime=fresh, **(settings | options))


def prompt(seed: int, tokens: int) -> list[int]:
    return list(map(int, text_tokens(1000 + seed, tokens)))


class Free:
    """A head whose drafts cost nothing and are all verified. A part of their tokens is made wrong."""

    def __init__(self, heads: DraftHeads, seed: int, wrong: float) -> None:
        self._heads = heads
        self._random = np.random.default_rng(seed)
        self._wrong = wrong

    def draft(self, batch: Batch, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        tokens, chances = self._heads.draft(batch, most)
        spoilt = self._random.random(tokens.shape) < self._wrong
        return np.where(spoilt, (tokens + 1) % VOCAB, tokens).astype(np.int32), np.full_like(chances, 0.9)

    @classmethod
    def put_into(cls, bench: Bench, seed: int, wrong: float) -> None:
        proposer: Any = bench.engine.parts.proposer
        assert isinstance(proposer, HeadProposer)
        proposer._cost.longer = lambda sequences, context, most: np.zeros(most)  # type: ignore[method-assign]
        proposer._cost.relative = lambda sequences, seconds: 0.0  # type: ignore[method-assign]
        assert proposer._heads is not None
        proposer._heads = cls(proposer._heads, seed, wrong)


# ---------------------------------------------------------------------------------------------------- same


def conversations(runtime: TorchRuntime, folder: Path, *, heads: bool) -> list[tuple[list[int], int]]:
    """Returns the answers and the tokens found of two conversations: cold, again, and after a restart."""
    answers: list[tuple[list[int], int]] = []
    for lives in (2, 1):
        bench = serve(runtime, tier=TierConfig(folder, 1 << 30), draft_tokens=None if heads else 0)
        if heads:
            Free.put_into(bench, 1, wrong=0.2)
        for _ in range(lives):
            for seed in range(2):
                history = prompt(seed, 150)
                for turn in range(4):
                    client = bench.answer(history, max_tokens=40)
                    answers.append((client.tokens, client.cached_tokens))
                    history += [*client.tokens, *prompt(10 * seed + turn, 20)]
        bench.engine.stop()
    return answers


# ----------------------------------------------------------------------------------------------- schedules


class Alone:
    """Answers of requests that run alone, without a head."""

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def __call__(self, tokens: Sequence[int], most: int, seed: int | None) -> list[int]:
        key = *tokens, -1, most, seed
        if key not in self._known:
            bench = serve(self._runtime, draft_tokens=0)
            client = bench.answer(tokens, stop=StopParams(max_tokens=most), sampling=sampling(seed))
            self._known[key] = client.tokens
        return self._known[key]


def sampling(seed: int | None) -> ResolvedSampling:
    return ResolvedSampling(temperature=0.0) if seed is None else ResolvedSampling(temperature=0.8, seed=seed)


def schedule(seed: int, runtime: TorchRuntime, alone: Alone, folder: Path) -> tuple[int, int, int]:
    """Plays a random schedule. Returns the compared answers, the wrong ones, and the accepted draft tokens."""
    random = np.random.default_rng(seed)
    tier = TierConfig(folder / str(seed), 1 << 26) if seed % 3 == 0 else TierConfig()
    bench = serve(
        runtime,
        int(random.integers(12, 40)),
        tier=tier,
        max_batch=int(random.integers(1, 9)),
        chunk_tokens=int(random.integers(3, 80)),
    )
    Free.put_into(bench, seed, wrong=0.3)
    waiting: list[tuple[list[int], int, int | None]] = []
    for _ in range(int(random.integers(3, 9))):
        tokens = prompt(int(random.integers(3)), int(random.integers(4, 90)))
        tokens += prompt(int(random.integers(20, 30)), int(random.integers(0, 12)))
        waiting.append(
            (tokens, int(random.integers(1, 40)), int(random.integers(3)) if random.random() < 0.3 else None)
        )
    running: list[tuple[Client, tuple[list[int], int, int | None]]] = []
    aborted: set[Any] = set()
    while waiting or bench.engine.scheduler.has_work:
        if waiting and (random.random() < 0.3 or not bench.engine.scheduler.has_work):
            request = waiting.pop()
            asked = bench.ask(
                request[0], stop=StopParams(max_tokens=request[1]), sampling=sampling(request[2])
            )
            running.append((asked, request))
        if running and random.random() < 0.02:
            client, _ = running[int(random.integers(len(running)))]
            bench.engine.abort(client.request.id)
            aborted.add(client.request.id)
        bench.run(1)
    bench.cache.check()
    bench.engine.stop()
    compared = wrong = 0
    for client, request in running:
        if client.request.id in aborted or not isinstance(client.events[-1], Finished):
            continue
        compared += 1
        wrong += client.tokens != alone(*request)
    return compared, wrong, bench.engine.stats().counters.accepted_draft_tokens


# --------------------------------------------------------------------------------------------------- speed


def tokens_per_s(bench: Bench, batch: int, answer: int, first: int) -> float:
    """Returns the tokens a second of a batch's answers, without their prompts."""
    clients = [bench.ask(prompt(first + seed, 200), answer) for seed in range(batch)]
    while not all(client.tokens for client in clients):
        bench.engine.step()
    began, before = time.perf_counter(), sum(len(client.tokens) for client in clients)
    while bench.engine.scheduler.has_work:
        bench.engine.step()
    done = sum(len(client.tokens) for client in clients) - before
    return done / (time.perf_counter() - began)


def speeds(with_head: TorchRuntime, without: TorchRuntime, batch: int, rounds: int) -> dict[str, float]:
    """Returns the medians of tokens a second, by the source of drafts. All sides take turns."""
    sides: dict[str, Callable[[], Bench]] = {
        "none": lambda: serve(without, draft_tokens=0),
        "lookup": lambda: serve(without),
        "head": lambda: serve(with_head),
    }
    benches = {side: make() for side, make in sides.items()}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, bench in benches.items():
            speed = tokens_per_s(bench, batch, 160, 100 + 20 * number)
            if number:  # kernels were chosen and costs learnt in the first
                found[side].append(speed)
    counters = benches["head"].engine.stats().counters
    return {side: statistics.median(each) for side, each in found.items()} | {
        "accepted": counters.accepted_draft_tokens / max(1, counters.draft_tokens)
    }


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--parts", default="same,schedules,speed", help="comma-separated")
    options.add_argument("--kinds", default=",".join(MODELS), help="comma-separated")
    options.add_argument("--models", type=Path, help="a folder in which trained models are kept")
    options.add_argument("--schedules", type=int, default=100, help="of each model")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    parts, figures, bars = args.parts.split(","), dict[str, Any](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for kind in args.kinds.split(","):
            directory = (args.models or folder) / kind
            if not (directory / "config.json").exists():
                train(kind, directory)
            with_head, without = (load(directory, args.threads, heads=heads) for heads in (True, False))
            if "same" in parts:
                ours = conversations(with_head, folder / f"{kind} with", heads=True)
                plain = conversations(without, folder / f"{kind} without", heads=False)
                pairs = list(zip(ours, plain, strict=True))
                figures[f"{kind}_answers"] = len(pairs)
                figures[f"{kind}_other_answers"] = sum(one[0] != other[0] for one, other in pairs)
                figures[f"{kind}_other_hits"] = sum(one[1] != other[1] for one, other in pairs)
                bars |= {f"{kind}_other_answers": exactly(0), f"{kind}_other_hits": exactly(0)}
            if "schedules" in parts:
                alone = Alone(without)
                played = [schedule(seed, with_head, alone, folder / kind) for seed in range(args.schedules)]
                compared, wrong, accepted = np.sum(played, 0).tolist()
                figures |= {
                    f"{kind}_compared": compared,
                    f"{kind}_wrong": wrong,
                    f"{kind}_accepted": accepted,
                }
                bars |= {f"{kind}_wrong": exactly(0), f"{kind}_accepted": at_least(1)}
            if "speed" in parts:
                for batch in (1, 8):
                    found = speeds(with_head, without, batch, args.rounds)
                    name = f"{kind}_{batch}"
                    figures |= {f"{name}_{side}": round(value, 2) for side, value in found.items()}
                    figures[f"{name}_gain"] = round(found["head"] / found["none"], 2)
                    bars[f"{name}_gain"] = at_least(1.3 if batch == 1 else 1.0)
            say(str({name: value for name, value in figures.items() if name.startswith(kind)}))
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
