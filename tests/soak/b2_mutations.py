"""B2: mutations of the package's code on the torch runtime, each of which must be caught (mutations.py).

A mutation drops the sinks, widens a window by one position, forgets to restore a state, …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutations import Mutation, Subject, nothing, show_mutations
from ties import run_quietly

from rootstock.cache.admission import Admission
from rootstock.cache.checkpoint_writer import CheckpointWriter
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.cache.lease import BlockTable
from rootstock.cache.plan import Plan, StateCopy
from rootstock.kernels.api import Scores
from rootstock.kernels.cpu import attention
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.sliced_attention import SlicedAttention
from rootstock.runtime.torch import hooks, step_cache
from rootstock.runtime.torch.hooks import AttentionCall
from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern
from rootstock.runtime.torch.kv_pool import LayerMemory, TorchPool
from rootstock.runtime.torch.runner import TorchRuntime
from rootstock.runtime.torch.state_pool import LayerStates, StateCache, TorchStatePool
from rootstock.runtime.torch.step_cache import PackedCache, SequenceCache
from twins import ways
from twins.test_twins import twin_in
from twins.torch_models import load

WAYS = (ways.batch, ways.chunked, ways.resumed, ways.cached, ways.readmitted, ways.served)


# ------------------------------------------------------------------------------------------------ the changes


def scores(change: Callable[[Scores], Scores]) -> Callable[[Any], Any]:
    """Changes the scale, soft cap or sinks of attention: an argument of its own, or a part of a call."""

    def of_call(call: AttentionCall) -> AttentionCall:
        return call._replace(scores=change(call.scores))

    def made(right: Any) -> Any:
        return lambda *args, **kwargs: right(
            *_changed(_changed(args, Scores, change), AttentionCall, of_call), **kwargs
        )

    return made


def family(change: Callable[[TokenFamily], TokenFamily]) -> Callable[[Any], Any]:
    """Changes the family from which a kernel derives the visible positions."""

    def wrong(right: Any) -> Any:
        def prepare(*args: Any) -> Any:
            # Released blocks are replaced by block 0: compiled loops do not check for them, and would read outside of
            # the pool, which ends the process.
            whole = _changed(args, list, lambda spans: [_with_all_blocks(span) for span in spans])
            return right(*_changed(whole, TokenFamily, change))

        return prepare

    return wrong


def _changed(args: Sequence[Any], kind: Any, change: Callable[[Any], Any]) -> list[Any]:
    return [change(arg) if isinstance(arg, kind) else arg for arg in args]


def _with_all_blocks(span: Span) -> Span:
    return replace(span, blocks=np.maximum(span.blocks, 0))


def wider(by: int) -> Callable[[TokenFamily], TokenFamily]:
    def change(family: TokenFamily) -> TokenFamily:
        return replace(family, window=family.window + by) if isinstance(family, SlidingWindow) else family

    return change


def chunk_as_window(family: TokenFamily) -> TokenFamily:
    return SlidingWindow(1, 1, family.chunk) if isinstance(family, ChunkedAttention) else family


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **kwargs: value


def from_the_next_slot(right: Any) -> Any:
    def copy(self: TorchStatePool, copies: Sequence[StateCopy]) -> None:
        right(self, [StateCopy((c.source + 1) % self.slots, c.target) for c in copies])

    return copy


def stores_only(kind: str) -> Callable[[Any], Any]:
    def wrong(right: Any) -> Any:
        def write(self: TorchStatePool, shape: Any, slots: Any, states: Any) -> None:
            if shape.key.kind == kind:
                right(self, shape, slots, states)

        return write

    return wrong


def states(change: Callable[[Any, bool], tuple[Any, bool]]) -> Callable[[Any], Any]:
    """Changes the slots of a call's states, and whether the call continues from them."""

    def wrong(right: Any) -> Any:
        def init(self: StateCache, pool: Any, slots: Any, *, continues: bool) -> None:
            slots, continues = change(slots, continues)
            right(self, pool, slots, continues=continues)

        return init

    return wrong


def fused_states(change: Callable[[LayerStates], LayerStates]) -> Callable[[Any], Any]:
    """Changes the states that a fused mixer gets."""

    def wrong(right: Any) -> Any:
        def of_mixer(self: TorchStatePool, *args: Any) -> LayerStates | None:
            given = right(self, *args)
            return None if given is None else change(given)

        return of_mixer

    return wrong


def marked(
    column: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[LayerStates], LayerStates]:
    """Changes one column of a step's sequences: 2 is the slot, 3 whether it has a state."""

    def changed(given: LayerStates) -> LayerStates:
        sequences = given.sequences.clone()
        sequences[:, column] = change(sequences[:, column])
        return replace(given, sequences=sequences)

    return changed


def several_at_a_time(right: Any) -> Any:
    def init(self: PackedCache, pool: Any, segments: Any, *, token_wise: bool = False) -> None:
        right(self, pool, segments)

    return init


def without(*names: str) -> Callable[[Any], Any]:
    """Drops arguments of attention that runs alone."""

    def wrong(right: Any) -> Any:
        def attend(call: hooks.AttentionCall) -> Any:
            kept = {name: given for name, given in call.extra.items() if name not in names}
            return right(call._replace(extra=kept))

        return attend

    return wrong


def yes_or_no(right: Any) -> Any:
    """Makes a boolean mask of a bias that is added to the scores."""

    def attend(call: hooks.AttentionCall) -> Any:
        mask: Any = call.mask
        return right(call._replace(mask=mask > torch.finfo(mask.dtype).min))

    return attend


def sees_all(right: Any) -> Any:
    def between(self: MaskPattern, past: int, end: int, device: torch.device) -> torch.Tensor:
        return torch.ones_like(right(self, past, end, device))

    return between


def not_stored(right: Any) -> Any:
    def update(self: SequenceCache, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        memory = self._pages.layers[layer_idx].indexer
        kept = memory.clone()
        out = right(self, indexer_key_states, layer_idx)
        memory.copy_(kept)
        return out

    return update


def values_lost(right: Any) -> Any:
    def write(self: LayerMemory, slots: Any, key: Any, value: Any) -> tuple[Any, Any]:
        right(self, slots, key, torch.zeros_like(value))
        return key, value

    return write


def without_states(right: Any) -> Any:
    """Drops the states of a plan and keeps its copies of blocks."""
    return lambda *args: Plan(copies=right(*args).copies)


def another_checkpoint(right: Any) -> Any:
    def first_plan(self: Admission, *args: Any) -> Plan:
        plan = right(self, *args)
        slots = self._pools.states.pool.total_blocks
        return replace(plan, states=tuple(StateCopy((c.source + 1) % slots, c.target) for c in plan.states))

    return first_plan


def one_block_early(right: Any) -> Any:
    def release_before(self: BlockTable, index: int) -> Any:
        return right(self, min(index + 1, self.length - 1))

    return release_before


def only_full_blocks(right: Any) -> Any:
    """Copies blocks in the first family only."""

    def copy(self: TorchPool, copies: Sequence[Any]) -> None:
        right(self, [c for c in copies if c.family == 0])

    return copy


def counted_in_the_step(right: Any) -> Any:
    def call(self: TorchRuntime, tokens: Any, positions: Any, cache: Any, rows: Any) -> Any:
        return right(self, tokens, torch.arange(len(positions)).numpy(), cache, rows)

    return call


# Of chunks, and of decodes: their loops lay a step out by themselves.
KERNELS = ((SlicedAttention, "prepare"), (GatherAttention, "prepare"), (attention, "_lay_out"))
# Of modules that are fused, and of those that run as they are.
SCORES = ((PackedCache, "attend"), (step_cache._PooledLayer, "attend"))
SLOTS = ((StateCache, "__init__"),)
STORE = ((TorchStatePool, "write"),)
FUSED = ((TorchStatePool, "of_mixer"),)

MUTATIONS = (
    # scores
    Mutation("the sinks are dropped", "gpt_oss", SCORES, scores(lambda s: replace(s, sinks=None))),
    Mutation("the soft cap is dropped", "gemma2", SCORES, scores(lambda s: replace(s, softcap=None))),
    Mutation("the scale is dropped", "llama", SCORES, scores(lambda s: replace(s, scale=1.0))),
    Mutation(
        "latents are scaled by their own width",
        "deepseek_v3",
        SCORES,
        scores(lambda s: replace(s, scale=32**-0.5)),
    ),
    # visible positions
    Mutation("a window is treated as full attention", "mistral", KERNELS, family(lambda f: EVERYTHING)),
    Mutation("a window with soft caps is treated as full", "gemma2", KERNELS, family(lambda f: EVERYTHING)),
    Mutation("a window is one position too long", "mistral", KERNELS, family(wider(1))),
    Mutation("a window is one position too short", "gpt_oss", KERNELS, family(wider(-1))),
    Mutation("a window of latents is one position too long", "dots3_note_text", KERNELS, family(wider(1))),
    Mutation("a chunk is treated as full attention", "llama4_text", KERNELS, family(lambda f: EVERYTHING)),
    Mutation("a chunk is treated as a window", "llama4_text", KERNELS, family(chunk_as_window)),
    Mutation(
        "attention that runs alone sees later positions", "diffllama", ((MaskPattern, "between"),), sees_all
    ),
    # positions
    Mutation(
        "a layer that asks for its position is told 0",
        "llama4_text",
        ((PackedCache, "get_seq_length"),),
        constant(0),
    ),
    Mutation("positions are counted in the step", "llama", ((TorchRuntime, "_call"),), counted_in_the_step),
    # blocks
    Mutation("a shared part of a block is not copied", "llama", ((TorchPool, "_copy"),), nothing),
    Mutation("a block of a window is not copied", "gemma3n_text", ((TorchPool, "_copy"),), only_full_blocks),
    Mutation("rotary keys of latents are not stored", "deepseek_v3", ((LayerMemory, "write"),), values_lost),
    # attention of its own kind
    Mutation(
        "an indexer's keys are not stored", "deepseek_v32", ((SequenceCache, "update_indexer"),), not_stored
    ),
    Mutation(
        "an indexer's choice is ignored", "deepseek_v32", ((hooks, "_attend_alone"),), without("indices")
    ),
    Mutation("a bias is dropped", "inkling_text", ((hooks, "_attend_alone"),), without("position_bias")),
    Mutation("a bias is taken for a mask", "doge", ((hooks, "_attend_alone"),), yes_or_no),
    # states
    Mutation("states are not restored", "mamba2", ((TorchStatePool, "copy"),), nothing),
    Mutation(
        "states are restored from the next slot",
        "qwen3_next",
        ((TorchStatePool, "copy"),),
        from_the_next_slot,
    ),
    Mutation(
        "states of convolutions stay as they were", "kimi_linear", STORE, stores_only("recurrent_states")
    ),
    Mutation("the only states stay as they were", "lfm2", STORE, stores_only("recurrent_states")),
    Mutation("recurrent states stay as they were", "kimi_linear", STORE, stores_only("conv_states")),
    Mutation("stored states are ignored", "minimax", SLOTS, states(lambda slots, _: (slots, False))),
    Mutation(
        "a sequence begins with its slot's old state",
        "zamba",
        SLOTS,
        states(lambda slots, _: (slots, True)),
    ),
    Mutation(
        "sequences get one another's states",
        "minimax",
        SLOTS,
        states(lambda slots, c: (slots.flip(0), c)),
    ),
    Mutation(
        "fused mixers ignore stored states", "qwen3_next", FUSED, fused_states(marked(3, torch.zeros_like))
    ),
    Mutation(
        "fused mixers begin with their slot's old state",
        "qwen3_5_text",
        FUSED,
        fused_states(marked(3, torch.ones_like)),
    ),
    Mutation(
        "fused mixers get one another's states",
        "olmo_hybrid",
        FUSED,
        fused_states(marked(2, lambda slots: slots.flip(0))),
    ),
    Mutation("fused scans ignore stored states", "bamba", FUSED, fused_states(marked(3, torch.zeros_like))),
    Mutation(
        "fused scans get one another's states",
        "mamba2",
        FUSED,
        fused_states(marked(2, lambda slots: slots.flip(0))),
    ),
    Mutation(
        "recurrent states of fused mixers stay as they were",
        "qwen3_next",
        FUSED,
        fused_states(lambda given: replace(given, recurrent=given.recurrent.clone())),
    ),
    Mutation(
        "convolutions of fused mixers keep no inputs",
        "qwen3_next",
        FUSED,
        fused_states(lambda given: replace(given, conv=given.conv.clone())),
    ),
    Mutation(
        "mixers that ignore stored states get several tokens",
        "zamba",
        ((PackedCache, "__init__"),),
        several_at_a_time,
    ),
    # in the cache, which the self-check does not use
    Mutation("the cache plans no restored state", "mamba2", ((Admission, "_first_plan"),), without_states),
    Mutation(
        "the cache restores another checkpoint",
        "falcon_h1",
        ((Admission, "_first_plan"),),
        another_checkpoint,
    ),
    Mutation(
        "a checkpoint is left without its state", "lfm2", ((CheckpointWriter, "leave"),), without_states
    ),
    Mutation(
        "blocks of a window go too early", "gemma3n_text", ((BlockTable, "release_before"),), one_block_early
    ),
)


def mode_of(directory: Path, model_type: str) -> str:
    return load(directory).description.execution_mode


if __name__ == "__main__":
    run_quietly()
    show_mutations("B2", Subject(twin_in, mode_of, WAYS), MUTATIONS, least=35)
