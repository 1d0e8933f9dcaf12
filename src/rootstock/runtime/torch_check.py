"""The self-check of every load: the model's own attention and ours must agree on a few dozen tokens.

The reference is the model's own file: its eager attention over dense K and V, one sequence at a time. Ours runs
the same tokens as the engine would: prefill in one pass and in chunks, several sequences and kinds of rows in one
step, decodes, a prefix of whole blocks taken over, and one that ends inside a block. Five forwards of a few dozen
rows in a pool of a few blocks, before the real pool exists.

In float32 no logit may be off by more than 1e-3 of the logits' standard deviation: a wrong mask, position or
scale shows as 1e-1 and more. In bfloat16 and float16 both sides round in every layer, how much of that reaches the
logits depends on the model, and in a mixture of experts a rounding can send a row to another expert. So the model
tells what rounding does to it: its own logits with and without one more rounding's worth of noise on the embedded
tokens. The figure is the median over rows of the relative root mean square error, for each kind of row. Correct
models measured 0.7 to 1.1 times their own noise (2 to 32 layers, 14 models); twice the noise is allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rootstock.cache.plan import BlockCopy, BlockId, BlockIds, Plan, Tokens
from rootstock.errors import SelfCheckFailed
from rootstock.kernels.torch_paged import Tuning
from rootstock.runtime.base import Batch, Logits, ModelDescription, Runtime, Segment
from rootstock.runtime.torch_hooks import IMPLEMENTATION

BLOCK_SIZE = 4
_LONG, _SHORT = 45, 22  # tokens of the two sequences
_FLOAT32_TOLERANCE = 1e-3
_NOISE_FACTOR = 2.0
_NOISE_SAMPLES = 3


def self_check(
    model: nn.Module,
    description: ModelDescription,
    make_runtime: Callable[[Tuning], Runtime],
    progress: Callable[[float], None],
) -> dict[str, float]:
    """The figure of each kind of row. Raises SelfCheckFailed if one is over what is allowed."""
    random = np.random.default_rng(0)
    tokens = {
        name: random.integers(0, description.vocab_size, min(length, description.context_limit), np.int32)
        for name, length in (("long", _LONG), ("short", _SHORT))
    }
    exact = description.dtype == "float32"
    with own_attention(model):
        expected = {name: dense_logits(model, sequence[None])[0] for name, sequence in tokens.items()}
        progress(0.3)
        allowed = (
            _FLOAT32_TOLERANCE if exact else _NOISE_FACTOR * noise(model, tokens["long"], description.dtype)
        )
    progress(0.5)
    figures = {}
    for kind, rows in (
        _Trial(make_runtime(_small_slices(description)), tokens["long"], tokens["short"]).run().items()
    ):
        ours = np.concatenate([row.logits for row in rows])
        own = np.concatenate(
            [expected[row.sequence][row.first : row.first + len(row.logits)] for row in rows]
        )
        figures[kind] = largest_difference(ours, own) if exact else relative_error(ours, own)
    progress(1.0)
    for kind, figure in figures.items():
        if not figure <= allowed:  # also if it is not a number
            measure = "largest difference of a logit" if exact else "relative error"
            raise SelfCheckFailed(description.name, figure, allowed, f"the {measure} of {kind}")
    return figures


def _small_slices(description: ModelDescription) -> Tuning:
    """Slices of about 8 positions, so that all that a kernel does occurs within so few tokens."""
    family = description.families[0]
    eight = max(1, 8 * family.bytes_per_token // (2 * family.layers))  # K is half of it
    return Tuning(eight, 2 * eight, many_rows=8, share_from=2 * BLOCK_SIZE)


def largest_difference(ours: Logits, own: Logits) -> float:
    """[rows, vocab] twice → in standard deviations of `own`."""
    return float(np.abs(ours - own).max() / own.std())


def relative_error(ours: Logits, own: Logits) -> float:
    """[rows, vocab] twice → the median row's root mean square difference, relative to the spread of its logits."""
    spread = np.sqrt(np.mean((own - own.mean(-1, keepdims=True)) ** 2, -1))  # [rows]
    return float(np.median(np.sqrt(np.mean((ours - own) ** 2, -1)) / spread))


def noise(model: nn.Module, tokens: Tokens, dtype: str) -> float:
    """The relative error that one more rounding of the embedded tokens makes in the model's own logits."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    random = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
        """embedded [samples, tokens, hidden]; the first sample stays as it is."""
        move = eps * (torch.rand(embedded.shape, generator=random) - 0.5).to(embedded.device)
        move[0] = 0
        return (embedded.float() * (1 + move)).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(shake)  # type: ignore[operator]
    try:
        still, *shaken = dense_logits(model, np.stack([tokens] * (1 + _NOISE_SAMPLES)))
    finally:
        hook.remove()
    # The logits themselves are rounded, so two sides can differ by that much even if nothing else does.
    return max(float(eps), relative_error(np.concatenate(shaken), np.concatenate([still] * _NOISE_SAMPLES)))


@contextlib.contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """The model as its file says: transformers calls "eager" what a modelling file itself defines."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def dense_logits(model: nn.Module, tokens: Tokens) -> NDArray[np.float32]:
    """tokens [sequences, tokens] → [sequences, tokens, vocab], each sequence in one pass without a cache."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        logits: NDArray[np.float32] = model(input_ids=ids, use_cache=False).logits.float().cpu().numpy()
    return logits


@dataclass(frozen=True, slots=True)
class _Scored:
    sequence: str
    first: int  # position of the first row
    logits: Logits


class _Sequence:
    def __init__(self, name: str, tokens: Tokens, blocks: BlockIds, past: int = 0) -> None:
        self.name = name
        self.tokens = tokens
        self.blocks = blocks
        self.past = past


class _Trial:
    """The schedule, on a runtime of its own. Scored rows are kept by what they show."""

    def __init__(self, runtime: Runtime, long: Tokens, short: Tokens) -> None:
        self._runtime = runtime
        self._rows: dict[str, list[_Scored]] = {}
        size = -(-_LONG // BLOCK_SIZE)  # blocks of a table
        runtime.allocate((4 * size,), BLOCK_SIZE)
        scattered = np.random.default_rng(1).permutation(size).astype(np.int32)
        self._tables = [np.arange(n * size, (n + 1) * size, dtype=np.int32) for n in (1, 2, 3)]
        self._long = _Sequence("long", long, scattered)
        self._short = _Sequence("short", short, self._tables.pop())

    def run(self) -> dict[str, list[_Scored]]:
        long, short = self._long, self._short
        self._step((long, 20, "a first chunk"), (short, 19, "a first chunk"))
        self._step((long, 33, "a later chunk"), (short, 20, "a decode"))
        whole = self._fork(4 * BLOCK_SIZE)
        inside = self._fork(7 * BLOCK_SIZE + 2)
        self._step(
            (whole, 38, "a chunk after a shared prefix"),
            (inside, 40, "a chunk after a copied part of a block"),
            (long, 34, "a decode"),
            (short, 21, "a decode"),
        )
        self._step(*((s, s.past + 1, "a decode") for s in (long, short, whole, inside)))
        self._step(*((s, s.past + 1, "a decode") for s in (inside, long, whole)))
        return self._rows

    def _fork(self, past: int) -> _Sequence:
        """Takes over the long sequence's first positions; a block that they fill in part is copied."""
        past = min(past, self._long.past - 1)
        table = self._tables.pop()
        shared, partly = divmod(past, BLOCK_SIZE)
        table[:shared] = self._long.blocks[:shared]
        if partly:
            source, target = (BlockId(int(blocks[shared])) for blocks in (self._long.blocks, table))
            self._runtime.apply(Plan((BlockCopy(source, target, partly),)))
        return _Sequence("long", self._long.tokens, table, past)

    def _step(self, *wanted: tuple[_Sequence, int, str]) -> None:
        """One forward that computes each sequence up to a position, or to its end if that comes first."""
        work = [(s, min(until, len(s.tokens)), kind) for s, until, kind in wanted]
        work = [(s, until, kind) for s, until, kind in work if until > s.past]
        if not work:
            return
        logits = self._runtime.forward(
            Batch(
                [
                    Segment(s.tokens[s.past : until], s.past, (s.blocks,), until - s.past)
                    for s, until, _ in work
                ]
            )
        )
        row = 0
        for sequence, until, kind in work:
            new = until - sequence.past
            scored = _Scored(sequence.name, sequence.past, logits[row : row + new])
            self._rows.setdefault(kind, []).append(scored)
            sequence.past, row = until, row + new
