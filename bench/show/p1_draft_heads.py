"""P1: drafts of the model's own heads: the same answers, the same hits, and more tokens a second.

Three models of different kinds are trained for some minutes each on the demo's text, byte by byte, and a head
behind each: a hybrid of recurrent states (Qwen3-Next's), latents (DeepSeek V3's), experts over plain K and V (GLM
4.5's).

*Same*: conversations of four turns, cold, again, and after a restart from disk, with the head and without: the
same tokens, and as many of each prompt found.

*Schedules*: requests that arrive, stop, are aborted and preempted at random times in a memory that is too small, some
of them sampled with a seed. Drafts cost nothing there, so that every step has some, and a third of them is wrong.
Each answer is compared with the one that the request has alone, without a head.

*Speed*: tokens a second while one or eight requests run: without drafts, with drafts by lookup, by the head, and by
both. A head of a model with 46 to 92 layers costs a fiftieth of a step or less. The trained models have 8 layers, so
that two layers that add nothing (their outputs are multiplied by zeros) are put behind each of them before. A prompt
and its answer stay within the positions on which the models were trained. Behind them a model writes noise, which no
head can foresee.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, conclude, exactly
from llamas import say
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn
from trained_tiny import LEARNING_RATE, VOCAB, text_tokens
from transformers import AutoConfig, AutoModelForCausalLM

from draft_checkpoints import name_head, names_of, read_config, with_head_layer
from engine.helpers import Bench, Client
from rootstock.cache.types import NO_TOKENS
from rootstock.config import ModelConfig, TierConfig
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import Finished, StopParams
from rootstock.engine.speculation.heads import HeadProposer
from rootstock.runtime.base import Batch, DraftHeads
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.torch.draft_heads import DraftHead, HeadedDecoder
from rootstock.runtime.torch.runner import TorchRuntime, load_model

SHOW = "P1"
LAYERS, TIMES = 8, 3  # trained ones, and times as many for the speed
TOKENS, SEQUENCES, STEPS = 128, 12, 600
PROMPT = 40  # tokens before an answer of the model
WIDE, ANSWERS = 96, 15  # answers in a batch, and batches, from which the head learns
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


class Trainee:
    """A model, the head behind it, and what is needed to save both under the names of real checkpoints."""

    def __init__(self, model: Any, model_type: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes the head's layer out of a model that has one layer more. `weights` of the head's other parts."""
        self.model, self.config, self.names = model, model.config, names_of(model_type)
        self.decoder = model.get_decoder()
        self._layers = self.decoder.layers
        block, self.decoder.layers = self._layers[LAYERS], self._layers[:LAYERS]
        self.config.num_hidden_layers = LAYERS
        norm, width = type(block.input_layernorm), self.config.hidden_size
        self.parts = {
            part: nn.Linear(2 * width, width, bias=False)
            if part == self.names.projection
            else norm(width, eps=1e-6)
            for part in self.names.parts
        }
        for part, weight in weights.items():
            self.parts[part].weight = nn.Parameter(weight)
        head = DraftHead(self.names, LAYERS, block, list(self.parts.values()))
        self.headed = HeadedDecoder(model, head)

    @property
    def head(self) -> nn.Module:
        return self.headed.head

    def guesses(self, batch: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Returns the head's logits behind each token, from the model's hidden states and from its own."""
        kept = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1].detach()], 1)
        positions, found = torch.arange(batch.shape[1])[None], list[torch.Tensor]()
        for _ in range(2):
            kept = self.headed._rows(self.decoder.embed_tokens(batch), kept, positions, None)
            found.append(self.model.lm_head(kept))
            kept = torch.cat([torch.zeros_like(kept[:, :1]), kept[:, :-1]], 1)
        return found

    def save(self, directory: Path) -> Path:
        del self.decoder.draft_head
        self.decoder.layers, self.config.num_hidden_layers = self._layers, LAYERS + 1
        self.model.eval().save_pretrained(directory)
        parts = {part: module.weight.detach() for part, module in self.parts.items()}
        return name_head(directory, self.names, parts)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def descend(
    parameters: list[nn.Parameter], steps: int, losses: Callable[[], tuple[torch.Tensor, ...]]
) -> NDArray[np.float64]:
    """Minimises the sum of losses. Returns the means of the last ones."""
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE / 2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE / 2, total_steps=steps, pct_start=0.1
    )
    seen = []
    for _ in range(steps):
        each = losses()
        optimizer.zero_grad()
        torch.stack(each).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        seen.append([float(loss.detach()) for loss in each])
    return np.mean(seen[-20:], 0)


def train(model_type: str, directory: Path, steps: int = STEPS) -> Path:
    """Trains a model and a head behind it on the demo's text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **{**_COMMON, **MODELS[model_type], **with_head_layer(model_type, LAYERS)}
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    made = Trainee(model, model_type, {})
    text, picks, began = text_tokens(1, 400_000), torch.Generator().manual_seed(2), time.monotonic()

    def losses() -> tuple[torch.Tensor, ...]:
        starts = torch.randint(0, len(text) - TOKENS, (SEQUENCES,), generator=picks)
        batch = torch.stack([text[start : start + TOKENS] for start in starts.tolist()])
        hidden = made.decoder(batch, use_cache=False)[0]
        first, second = (cross_entropy(guess[:, :-1], batch[:, 1:]) for guess in made.guesses(batch, hidden))
        return cross_entropy(model.lm_head(hidden[:, :-1]), batch[:, 1:]), first, 0.3 * second

    mean = descend(list(model.parameters()), steps, losses)
    say(
        f"{model_type}: {mean[0]:.2f} nats a byte, {mean[1]:.2f} by the head, {time.monotonic() - began:.0f} s"
    )
    return made.save(directory)


def distil(model_type: str, source: Path, directory: Path) -> Path:
    """Trains the head alone to say what the model says, on the model's own answers, as heads in use are trained."""
    names, config = names_of(model_type), AutoConfig.from_pretrained(source)
    own, layer = names.own.format(layer=LAYERS), f"model.layers.{LAYERS}."
    for name, value in with_head_layer(model_type, LAYERS).items():
        setattr(config, name, value)
    stored = load_file(source / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=torch.float32,
        key_mapping={"^" + re.escape(own + names.block): layer},
        attn_implementation="eager",
    )
    made = Trainee(model, model_type, {part: stored[f"{own}{part}.weight"] for part in names.parts})
    model.requires_grad_(False)
    made.head.requires_grad_(True)
    began, answers = time.monotonic(), list[torch.Tensor]()
    for number in range(ANSWERS):
        starts = torch.stack([prompt_of(5000 + WIDE * number + i, PROMPT) for i in range(WIDE)])
        with torch.inference_mode():
            wide = model.generate(starts, max_new_tokens=TOKENS - PROMPT, do_sample=False, pad_token_id=0)
        answers.extend(wide.clone().split(2 * SEQUENCES))
    turns = itertools.cycle(answers)

    def losses() -> tuple[torch.Tensor, ...]:
        batch = next(turns)
        with torch.no_grad():
            hidden = made.decoder(batch, use_cache=False)[0]
            said = model.lm_head(hidden).argmax(-1)
        first, second = (cross_entropy(guess, said) for guess in made.guesses(batch, hidden))
        return first, 0.3 * second

    mean = descend(list(made.head.parameters()), STEPS // 2, losses)
    say(f"{model_type}: {mean[0]:.2f} nats from the model's choice, {time.monotonic() - began:.0f} s")
    return made.save(directory)


def prompt_of(seed: int, tokens: int) -> torch.Tensor:
    return text_tokens(1000 + seed, tokens)


def deepen(source: Path, directory: Path, times: int) -> Path:
    """Saves a model with times as many layers that computes the same: copies behind each layer write zeros."""
    config, tensors = read_config(source), dict[str, torch.Tensor]()
    layers = config["num_hidden_layers"]
    for name, tensor in load_file(source / "model.safetensors").items():
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            tensors[name] = tensor
            continue
        index, rest = int(found[1]), found[2]
        tensors[f"model.layers.{times * index}.{rest}"] = tensor
        writes = re.search(r"\b(o_proj|out_proj|down_proj)\b", rest)
        for copy in range(1, times if index < layers else 1):
            copied = torch.zeros_like(tensor) if writes else tensor.clone()
            tensors[f"model.layers.{times * index + copy}.{rest}"] = copied
    config |= {
        each: times * config[each]
        for each in ("num_hidden_layers", "first_k_dense_replace")
        if each in config
    }
    for each in ("layer_types", "mlp_layer_types"):
        if config.get(each):
            config[each] = [kind for kind in config[each] for _ in range(times)]
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path, threads: int, *, heads: bool) -> TorchRuntime:
    config = ModelConfig(str(directory), device="cpu", dtype="float32", threads=threads)
    return load_model(config, demands=Demands(draft_heads=heads))


def serve(runtime: TorchRuntime, blocks: int = 2000, **options: Any) -> Bench:
    """Serves a loaded model from an empty cache, with drafts of any source unless the options say otherwise."""
    fresh = TorchRuntime(runtime._model, runtime._served, decoder=runtime._decoder)
    settings: dict[str, Any] = {"draft_tokens": None, "idle_work": False, "max_session_wait_s": 0.0}
    return Bench(blocks, 16, runtime=fresh, **(settings | options))


def prompt(seed: int, tokens: int) -> list[int]:
    return list(map(int, prompt_of(seed, tokens)))


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
        bench.load_always()
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


def tokens_per_s(bench: Bench, batch: int, seed: int) -> float:
    """Returns the tokens a second of three batches of answers, one batch after another. Of each, the time counts from
    the last one's first token to the first one's end: all of the batch run in between."""
    done, seconds = 0, 0.0
    for first in range(seed, seed + 3 * batch, batch):
        clients = [bench.ask(prompt(first + number, PROMPT), TOKENS - PROMPT) for number in range(batch)]
        while not all(client.tokens for client in clients):
            bench.engine.step()
        began, before = time.perf_counter(), sum(len(client.tokens) for client in clients)
        while not any(isinstance(client.events[-1], Finished) for client in clients):
            bench.engine.step()
        seconds += time.perf_counter() - began
        done += sum(len(client.tokens) for client in clients) - before
        while bench.engine.scheduler.has_work:
            bench.engine.step()
    return done / seconds


def without_lookup(bench: Bench) -> Bench:
    proposer: Any = bench.engine.parts.proposer
    proposer._look_up = lambda sequence, lease, most: (NO_TOKENS, 0)
    return bench


def speeds(with_head: TorchRuntime, without: TorchRuntime, batch: int, rounds: int) -> dict[str, float]:
    """Returns the medians of tokens a second by the source of drafts, and of the gains within a round. All sides take
    turns."""
    benches = {
        "none": serve(without, draft_tokens=0),
        "lookup": serve(without),
        "head": without_lookup(serve(with_head)),
        "both": serve(with_head),
    }
    found: dict[str, list[float]] = {side: [] for side in benches}
    for number in range(rounds + 1):
        for side, bench in benches.items():
            speed = tokens_per_s(bench, batch, 100 + 24 * number)
            if number:  # kernels were chosen and costs learnt in the first
                found[side].append(speed)
    figures = {side: statistics.median(each) for side, each in found.items()}
    for side in ("lookup", "head", "both"):
        gains = [speed / plain for speed, plain in zip(found[side], found["none"], strict=True)]
        figures[f"{side}_gain"] = statistics.median(gains)
    counters = benches["head"].engine.stats().counters
    figures["accepted"] = counters.accepted_draft_tokens / max(1, counters.draft_tokens)
    return figures


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
                distil(kind, train(kind, folder / f"{kind} trained"), directory)
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
                deeper = deepen(directory, folder / f"{kind} deeper", TIMES)
                with_head, without = (load(deeper, args.threads, heads=heads) for heads in (True, False))
                for batch in (1, 8):
                    found = speeds(with_head, without, batch, args.rounds)
                    name = f"{kind}_{batch}"
                    figures |= {f"{name}_{side}": round(value, 2) for side, value in found.items()}
                    bars |= {
                        f"{name}_{side}_gain": at_least(1.3 if batch == 1 else 1.0)
                        for side in ("head", "both")
                    }
            say(str({name: value for name, value in figures.items() if name.startswith(kind)}))
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
