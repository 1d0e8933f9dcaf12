"""Draft heads: found under the names of real checkpoints, exact on the pools, and of no effect on answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from draft_checkpoints import HEADED, LISTS, names_of, read_config, save_headed
from engine.helpers import Bench, numbers
from image_checkpoints import save_images
from image_schedules import Player
from rootstock.cache.types import NO_TOKENS, Tokens
from rootstock.config import ModelConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.speculation.heads import HeadProposer
from rootstock.runtime.base import Batch, DraftHeads, Segment
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.torch import draft_heads
from rootstock.runtime.torch.draft_heads import stored_head
from rootstock.runtime.torch.runner import TorchRuntime, load_model
from twins.driving import ByHand, allocate, random_tokens

LAYERS = 4


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that saves a model with a head, once for each type."""
    return functools.cache(lambda kind: save_headed(tmp_path_factory.mktemp(kind) / kind, kind, LAYERS))


def load(directory: Path, *, heads: bool = True, **options: Any) -> TorchRuntime:
    config = ModelConfig(str(directory), device="cpu", dtype="float32", threads=1, **options)
    return load_model(config, demands=Demands(draft_heads=heads))


class Reference:
    """A model and its head by transformers' modules alone, over whole sequences."""

    def __init__(self, directory: Path, model_type: str) -> None:
        names = names_of(model_type)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        stored = load_file(directory / "model.safetensors")
        own = names.own.format(layer=LAYERS)
        self.parts = {part: stored[f"{own}{part}.weight"] for part in names.parts}
        self.names = names
        # The head's layer is the last one of a model that has one more.
        config = AutoConfig.from_pretrained(directory)
        config.num_hidden_layers = LAYERS + 1
        of_head = {"layer_types": "full_attention", "indexer_types": "full"}
        for name in LISTS:
            if isinstance(kinds := getattr(config, name, None), list):
                setattr(config, name, [*kinds, of_head.get(name, kinds[-1])])
        config._attn_implementation = "eager"
        moved = own + names.block
        mapping = {"^" + moved.replace(".", r"\."): f"model.layers.{LAYERS}."}
        larger: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float32, key_mapping=mapping, attn_implementation="eager"
        ).eval()
        self.block = larger.model.layers[LAYERS]

    def draft(self, tokens: Tokens) -> Tensor:
        """Returns the head's logits behind each token [tokens, vocab]."""
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            decoder = self.model.model
            embedded = decoder.embed_tokens(ids)
            hidden = decoder(ids, use_cache=False)[0]
            before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
            both = [
                self._norm(self.names.embedding_norm, embedded),
                self._norm(self.names.hidden_norm, before),
            ]
            mixed = torch.cat(both[::-1] if self.names.is_hidden_first else both, -1)
            mixed = mixed @ self.parts[self.names.projection].T
            places = torch.arange(len(tokens))[None]
            mask = create_causal_mask(
                self.model.config, embedded, None, past_key_values=None, position_ids=places
            )
            rows = self.block(
                mixed,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=decoder.rotary_emb(embedded, position_ids=places),
            )
            rows = rows[0] if isinstance(rows, tuple) else rows
            logits: Tensor = self.model.lm_head(self._norm(self.names.norm, rows))[0]
        return logits

    def _norm(self, part: str, rows: Tensor) -> Tensor:
        norm: nn.Module = type(self.block.input_layernorm)(rows.shape[-1], eps=self.model.config.rms_norm_eps)
        norm.weight = nn.Parameter(self.parts[part])
        normed: Tensor = norm(rows)
        return normed


@pytest.mark.parametrize("model_type", HEADED)
def test_a_head_computes_on_the_pools_what_it_computes_alone(headed: Any, model_type: str) -> None:
    """Prompts in pieces and side by side, moved to other rows as by a tier, and continued from there."""
    directory = headed(model_type)
    runtime, reference = load(directory), Reference(directory, model_type)
    assert runtime.draft_heads is not None
    allocate(runtime)
    driver = ByHand(runtime)
    random = np.random.default_rng(0)
    vocab = runtime.description.vocab_size
    running = [driver.start(random_tokens(vocab, length, length)) for length in (40, 29, 3)]
    whole_rows: list[int] = []
    assert runtime._decoder is not None
    runtime._decoder.head.norm.register_forward_hook(lambda *_: whole_rows.append(1))
    while work := {r: int(random.integers(1, 12)) for r in running if r.past < len(r.tokens) - 1}:
        driver.step({r: min(new, len(r.tokens) - 1 - r.past) for r, new in work.items()})
        moved = running[int(random.integers(len(running)))]
        driver.move(moved)
    assert not whole_rows, "a step computes more of the head than K and V"
    segments = [Segment(r.tokens[-1:], r.past, r.tables, 0) for r in running]
    drafted, chances = runtime.draft(Batch(segments), 1)
    assert whole_rows
    for r, token, chance in zip(running, drafted[:, 0], chances[:, 0], strict=True):
        exact = reference.draft(r.tokens)[-1].softmax(-1)
        assert int(token) == int(exact.argmax())
        assert chance == pytest.approx(float(exact.max()), abs=1e-4)


@pytest.mark.parametrize("model_type", HEADED)
def test_a_models_answers_are_the_same_with_its_head(headed: Any, model_type: str, tmp_path: Path) -> None:
    """Cold, warm, from disk after a restart; drafts are always wrong, and no later turn finds less."""
    directory = headed(model_type)
    prompt = numbers(1, 50)
    found: list[list[tuple[list[int], int]]] = []
    for heads in (False, True):
        answers: list[tuple[list[int], int]] = []
        for _ in range(2):
            runtime = load(directory, heads=heads)
            tier = TierConfig(tmp_path / str(heads), 1 << 26)
            bench = Bench(400, 8, runtime=runtime, tier=tier, draft_tokens=None, idle_work=False)
            _be_free(bench.engine)
            bench.load_always()
            history = list(prompt)
            for turn in range(3):
                client = bench.answer(history, max_tokens=24)
                answers.append((client.tokens, client.cached_tokens))
                history += [*client.tokens, *numbers(turn + 2, 7)]
            counters = bench.engine.stats().counters
            assert (counters.draft_tokens > 0) == heads
            bench.engine.stop()
        found.append(answers)
    assert found[0] == found[1]


def test_a_head_that_overflows_costs_no_request(tmp_path: Path) -> None:
    directory = save_headed(tmp_path, "qwen2", LAYERS)
    prompts = [numbers(seed, 50) for seed in range(3)]
    plain = Bench(400, 8, runtime=load(directory, heads=False), idle_work=False)
    expected = [plain.answer(prompt, max_tokens=60).tokens for prompt in prompts]
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.mtp_layers.0.final_layernorm.weight"][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    bench = Bench(400, 8, runtime=load(directory), draft_tokens=None, idle_work=False)
    proposer: Any = bench.engine.parts.proposer
    _cost_nothing(proposer)
    calls: list[int] = []
    draft = proposer._heads.draft
    proposer._heads = type("Counted", (), {"draft": lambda _, *given: calls.append(1) or draft(*given)})()
    assert [bench.answer(prompt, max_tokens=60).tokens for prompt in prompts] == expected
    assert calls


class Sure:
    """A head that is sure of itself."""

    def __init__(self, draft_heads: DraftHeads) -> None:
        self._heads = draft_heads

    def draft(self, batch: Batch, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        tokens, chances = self._heads.draft(batch, most)
        return tokens, np.full_like(chances, 0.9)


def _cost_nothing(proposer: Any) -> None:
    proposer._cost.longer = lambda sequences, context, most: np.zeros(most)
    proposer._cost.relative = lambda sequences, seconds: 0.0


def _be_free(engine: Engine) -> None:
    """Makes drafts of heads pay, whatever a step takes here."""
    proposer: Any = engine.parts.proposer
    if isinstance(proposer, HeadProposer):
        _cost_nothing(proposer)
        proposer._heads = Sure(proposer._heads)


def test_a_head_that_is_right_more_often_than_it_says_is_believed_in_time(headed: Any) -> None:
    """Drafts are compared with the tokens that come, even if they were not worth verifying."""
    prompt = numbers(1, 50)
    plain = Bench(400, 8, runtime=load(headed("qwen2"), heads=False), idle_work=False)
    expected = plain.answer(prompt, max_tokens=60).tokens

    class Modest:
        def draft(self, batch: Batch, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
            first = batch.segments[0].past - len(prompt) + 1
            tokens = [*expected[first : first + most], *[0] * most][:most]
            return np.array([tokens], np.int32), np.full((1, most), 0.2, np.float32)

    bench = Bench(400, 8, runtime=load(headed("qwen2")), draft_tokens=None, idle_work=False)
    proposer: Any = bench.engine.parts.proposer
    proposer._heads = Modest()
    proposer._look_up = lambda sequence, lease, most: (NO_TOKENS, 0)
    proposer._cost.longer = lambda sequences, context, most: 0.4 * np.arange(1, most + 1)
    proposer._cost.relative = lambda sequences, seconds: 0.01
    assert bench.answer(prompt, max_tokens=60).tokens == expected
    counters = bench.engine.stats().counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 10


def test_a_head_in_an_unknown_form_is_left_out(headed: Any) -> None:
    names = names_of("deepseek_v3")
    config = AutoConfig.from_pretrained(headed("deepseek_v3"))
    last = f"model.layers.{LAYERS - 1}.input_layernorm.weight", "F32"
    stored = [(f"{names.own.format(layer=LAYERS)}{part}.weight", "F32") for part in names.parts]
    assert stored_head([last, *stored], config) is not None
    assert stored_head([last, *stored[1:]], config) is None
    assert stored_head([last, *((name, "I32") for name, _ in stored)], config) is None
    config.num_hidden_layers += 1
    assert stored_head([last, *stored], config) is None, "it is a layer of the model"


def test_the_layers_of_a_model_that_sees_images_have_another_prefix() -> None:
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=4)
    names = names_of("qwen3_5_text")
    stored = [(f"mtp.{part}.weight", "BF16") for part in names.parts]
    for prefix in ("model.layers.", "model.language_model.layers."):
        found = stored_head([(f"{prefix}3.mlp.up_proj.weight", "BF16"), *stored], config)
        assert found is not None
        assert found.moved == {r"^mtp\.layers\.0\.": f"{prefix}4."}


def test_a_checkpoint_with_half_a_head_is_served_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_headed(tmp_path, "qwen2", LAYERS)
    tensors = load_file(directory / "model.safetensors")
    removed = [name for name in tensors if "mtp_layers" in name and "mlp" in name]
    save_file(
        {name: tensors[name] for name in tensors.keys() - set(removed)},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    runtime = load(directory)
    assert removed
    assert runtime.draft_heads is None
    assert "draft head is not used" in caplog.text
    assert runtime.description.families == load(directory, heads=False).description.families


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("input_proj", lambda weight: weight[:, : len(weight)]),
        ("input_proj", lambda weight: weight[0]),
        ("token_layernorm", lambda weight: torch.cat([weight, weight])),
        ("final_layernorm", lambda weight: weight[:-1]),
        ("mlp.up_proj", lambda weight: weight[:-1]),
        ("self_attn.q_proj", lambda weight: weight[0]),
    ],
)
def test_a_head_of_other_shapes_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, change: Callable[[Tensor], Tensor]
) -> None:
    directory = save_headed(tmp_path, "qwen2", LAYERS)
    tensors = load_file(directory / "model.safetensors")
    name = f"model.mtp_layers.0.{part}.weight"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    runtime = load(directory)
    assert runtime.draft_heads is None
    assert "draft head is not used" in caplog.text
    assert runtime.description.families == load(directory, heads=False).description.families


def test_a_model_that_cannot_have_one_more_layer_is_served_without_its_head(
    headed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list with a kind for each layer, which the loader does not know, is one such reason."""
    kinds = {name: kind for name, kind in draft_heads._KINDS.items() if name != "indexer_types"}
    monkeypatch.setattr(draft_heads, "_KINDS", kinds)
    assert load(headed("glm_moe_dsa")).draft_heads is None
    assert "draft head is not used" in caplog.text


def test_heads_are_not_loaded_unless_drafts_are_on(headed: Any) -> None:
    with_head, without = (load(headed("qwen2"), heads=heads).description for heads in (True, False))
    assert with_head.families[0].layers == without.families[0].layers + 1
    assert with_head.namespace() != without.namespace()
    assert read_config(headed("qwen2"))["num_hidden_layers"] == LAYERS


def test_a_model_that_sees_images_has_its_head(tmp_path: Path) -> None:
    directory = save_images(tmp_path / "model", "qwen3_5")
    tensors = load_file(directory / "model.safetensors")
    full, width = "model.language_model.layers.1.", 64
    block = {
        name.replace(full, "mtp.layers.0."): each.clone() for name, each in tensors.items() if full in name
    }
    names = names_of("qwen3_5_text")
    parts = {f"mtp.{part}.weight": torch.full((width,), 0.1) for part in names.parts}
    parts[f"mtp.{names.projection}.weight"] = torch.eye(width, 2 * width)
    save_file(tensors | block | parts, directory / "model.safetensors", {"format": "pt"})
    answers = []
    for heads in (True, False):
        runtime = load(directory, heads=heads)
        assert (runtime.draft_heads is not None) == heads
        assert runtime.description.images == "seen"
        bench = Bench(400, 8, runtime=runtime, draft_tokens=None)
        _be_free(bench.engine)
        answers.append(bench.answer(numbers(3, 40), max_tokens=16).tokens)
        assert (bench.engine.stats().counters.draft_tokens > 0) == heads
    assert answers[0] == answers[1]
    player = Player(directory)
    for seed in (4, 8):  # with drafts
        player.play(seed, tmp_path / str(seed), steps=3)
    assert player.tally.wrong == []
    assert player.tally.images > 0
