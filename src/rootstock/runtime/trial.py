"""Trial of a runtime, for the self-check of every load: the forwards of an engine in miniature.

It runs 45 tokens, or 241 with blocks of 32, as the engine would: prefill in one pass and in chunks, several sequences
and kinds of rows in one step, decodes of a batch that stays the same and of one that changes, a sequence that begins
beside decodes, prefills with logits of their last rows only, a shared prefix of whole blocks, a prefix that ends
inside a block, and one that a tier restores, each with the recurrent state that was kept there. Blocks that a window
or chunk has left behind are released. These are nine forwards of up to 160 rows in pools of a few rows, before the
real pools exist. Each runtime compares the rows with the model of its own library, one sequence at a time, in one
pass (`compare`).

Some models compute decodes differently from prefills. Rows that differ from one pass may therefore equal the result
of the model with its own cache: the prompt in one pass, then token by token, as `generate` does. They are never
compared with chunked prefills of the model, because some models then ignore their stored state.

Both sides round in every layer. How much of that reaches the logits depends on the model. The allowed difference is
therefore measured on the model: its own logits with and without noise on the embedded tokens, of the size of one more
rounding.

- In float32 the figure is the largest difference of a logit, in standard deviations of the logits. 1e-3 is allowed,
  or 8 times the model's own noise if that is at most 1e-2; above it, right and wrong cannot be distinguished. Of 97
  architectures with random weights, correct ones measured up to 2.1 times their noise, and wrong ones at least 160
  times: a wrong mask, position or scale shows as 1e-1 and more.
- In bfloat16 and float16 a rounding can send a row of a mixture of experts to another expert. The figure is therefore
  the median over rows of the relative root mean square error, for each kind of row. Correct models measured 0.7 to
  1.1 times their own noise (2 to 32 layers, 14 models); twice the noise is allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import RecurrentState, token_families
from rootstock.cache.plan import BlockCopy, Plan, RowPart, StateCopy
from rootstock.cache.types import NO_BLOCK, NO_SLOT, BlockId, BlockIds, SlotId, Tokens
from rootstock.runtime.base import Batch, Logits, ModelDescription, Runtime, Segment

BLOCK_SIZE = 4  # of pools that take any
_BEHIND, _SHORT = 17, 24  # tokens of the long sequence behind its seventh block, and of the short one
_SEQUENCES = 8
_FLOAT32_TOLERANCE, _FLOAT32_MOST = 1e-3, 1e-2

Measure = Callable[[Logits, Logits], float]
"""Returns a figure of the difference of two logits [rows, vocab], ours and the model's own."""


class Disagreement(Exception):
    """Error: the figure of a kind of row is larger than allowed."""

    def __init__(self, figure: float, allowed: float, quantity: str) -> None:
        super().__init__(f"{quantity} is {figure:.3g}, at most {allowed:.3g} is allowed")
        self.figure = figure
        self.allowed = allowed
        self.quantity = quantity


@dataclass(frozen=True, slots=True)
class TrialResult:
    figures: dict[str, float]  # by kind of row
    remark: str  # note about a model that passed, or ""


def trial_tokens(description: ModelDescription) -> dict[str, Tokens]:
    random = np.random.default_rng(0)
    long = 7 * (description.block_size or BLOCK_SIZE) + _BEHIND
    return {
        name: random.integers(0, description.vocab_size, min(length, description.context_limit), np.int32)
        for name, length in (("long", long), ("short", _SHORT))
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """A LoRA adapter to check: the long sequence is its, the short one is the base model's."""

    adapter: str  # of the segments
    merged: Callable[[], contextlib.AbstractContextManager[None]]  # runs the model with merged weights

    def serving(self, sequence: str) -> contextlib.AbstractContextManager[None]:
        """Runs the model as it serves a sequence of the trial."""
        return self.merged() if sequence == "long" else contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class ScoredRows:
    sequence: str
    positions: slice
    prefilled: int  # positions that were computed in chunks, before the first decode
    logits: Logits


class OwnModel(Protocol):
    """A model as its own library runs it, which is the reference of the self-check. Logits are [tokens, vocab]."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Runs the model by its own code. Everything below is called in this context."""
        ...

    def in_one_pass(self, tokens: Tokens) -> Logits: ...

    def decoded(self, tokens: Tokens, prefilled: int) -> Logits:
        """Computes the first `prefilled` tokens in one pass, and the others one by one with the model's own cache."""
        ...

    def noise(self, tokens: Tokens, measure: Measure) -> float:
        """Measures the change of the logits by one more rounding of the embedded tokens."""
        ...


def check(
    own: OwnModel,
    description: ModelDescription,
    make_runtime: Callable[[], Runtime],
    progress: Callable[[float], None],
    variant: Variant | None = None,
) -> TrialResult:
    """Runs the trial on a runtime and compares it with the model's own logits. Raises Disagreement if the figure of a
    kind of row is larger than allowed."""
    tokens = trial_tokens(description)

    def serving(sequence: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if variant is None else variant.serving(sequence)

    def decoded(rows: ScoredRows) -> Logits:
        end = rows.positions.stop
        with own.running(), serving(rows.sequence):
            logits = own.decoded(tokens[rows.sequence][:end], min(rows.prefilled, end))
        return logits[rows.positions]

    def noise(measure: Measure) -> float:
        with own.running(), serving("long"):
            return own.noise(tokens["long"], measure)

    expected: dict[str, Logits] = {}
    with own.running():
        for name, sequence in tokens.items():
            with serving(name):
                expected[name] = own.in_one_pass(sequence)
    progress(0.3)
    adapter = "" if variant is None else variant.adapter
    rows = Trial(make_runtime(), tokens["long"], tokens["short"], adapter).run()
    progress(0.7)
    verdict = compare(rows, expected, decoded, noise, description.dtype)
    progress(1.0)
    return verdict


def compare(
    rows: Mapping[str, Sequence[ScoredRows]],
    expected: Mapping[str, Logits],
    decoded: Callable[[ScoredRows], Logits],
    noise: Callable[[Measure], float],
    dtype: str,
) -> TrialResult:
    """Compares the rows of a trial with the model's own. Raises Disagreement if they differ by more than allowed.

    `expected`: each sequence [tokens, vocab] in one pass. `decoded` computes rows by the model with its own cache:
    the prefilled positions in one pass, then token by token. `noise` measures the change of the model's own logits
    by one more rounding of the embedded tokens.
    """
    is_exact = dtype == "float32"
    measure = measure_for(dtype)
    quantity = "largest difference of a logit" if is_exact else "relative error"
    allowed = _FLOAT32_TOLERANCE if is_exact else allowed_difference(dtype, noise)
    figures, remarks = {}, []
    for kind, its in rows.items():
        ours = np.concatenate([row.logits for row in its])
        own = np.concatenate([expected[row.sequence][row.positions] for row in its])
        figures[kind] = measure(ours, own)
        if figures[kind] <= allowed:
            continue
        # The rows differ or are not numbers. Compare them with the model's own decodes, and allow its own noise.
        decodes = np.concatenate([decoded(row) for row in its])
        allowed = max(allowed, allowed_difference(dtype, noise))
        if measure(ours, decodes) < figures[kind]:
            figures[kind] = measure(ours, decodes)
            remarks.append(f"{kind} by the model itself differs from one pass by {measure(decodes, own):.2g}")
        if not figures[kind] <= allowed:
            raise Disagreement(figures[kind], allowed, f"the {quantity} of {kind}")
    return TrialResult(figures, "; ".join(remarks))


def measure_for(dtype: str) -> Measure:
    return largest_difference if dtype == "float32" else relative_error


def allowed_difference(dtype: str, noise: Callable[[Measure], float]) -> float:
    """Returns the difference that is allowed for the noise of a model in this dtype."""
    if dtype == "float32":
        allowed = 8 * noise(largest_difference)
        return allowed if allowed <= _FLOAT32_MOST else _FLOAT32_TOLERANCE
    # Unrelated logits differ by 1.4, so noise as large as that would allow everything.
    return min(1.0, 2 * noise(relative_error))


def largest_difference(ours: Logits, own: Logits) -> float:
    """Returns the largest difference of two logits [rows, vocab], in standard deviations of `own`.

    A model hides tokens that must not come by a logit of minus infinity, which both sides then have.
    """
    hidden = np.isneginf(own)
    if hidden.any():
        if not np.array_equal(hidden, np.isneginf(ours)):
            return float("inf")
        ours, own = ours[~hidden], own[~hidden]
    return float(np.abs(ours - own).max() / own.std())


def relative_error(ours: Logits, own: Logits) -> float:
    """Returns the median row's root mean square difference of two logits [rows, vocab], relative to the row's
    spread."""
    # Row by row, because some vocabularies have hundreds of thousands of tokens.
    rows = zip(ours, own, strict=True)
    return float(np.median([np.sqrt(np.mean((one - other) ** 2)) / other.std() for one, other in rows]))


class _Sequence:
    def __init__(
        self, name: str, tokens: Tokens, tables: list[BlockIds], state: SlotId, past: int = 0
    ) -> None:
        self.name = name
        self.tokens = tokens
        self.tables = tables  # of each token family
        self.state = state
        self.past = past
        self.prefilled = past


class Trial:
    """Schedule of the self-check on a runtime of its own. Scored rows are grouped by their kind."""

    def __init__(self, runtime: Runtime, long: Tokens, short: Tokens, adapter: str = "") -> None:
        """`adapter`: of the long sequence."""
        self._runtime = runtime
        self._adapter = adapter
        self._rows: dict[str, list[ScoredRows]] = {}
        self._kept: dict[int, SlotId] = {}  # saved states of the long sequence, by position
        families = runtime.description.families
        self._families = token_families(families)
        self._stateful = len(self._families) < len(families)
        self._block_size = runtime.description.block_size or BLOCK_SIZE
        self._size = -(-(7 * self._block_size + _BEHIND) // self._block_size)  # blocks of a table
        self._slots = iter(range(_SEQUENCES + 2))
        runtime.allocate(
            [_SEQUENCES + 2 if isinstance(f, RecurrentState) else _SEQUENCES * self._size for f in families],
            self._block_size,
        )
        self._made = 0
        self._long = self._sequence("long", long, np.random.default_rng(1).permutation(self._size))
        self._short = self._sequence("short", short, np.arange(self._size))

    def run(self) -> dict[str, list[ScoredRows]]:
        long, short = self._long, self._short
        first, second = 4 * self._block_size, 7 * self._block_size + 2  # positions at which forks resume
        self._step((long, first, "a first chunk"), (short, 19, "a first chunk"))
        self._keep_state()
        self._step((long, second, "a later chunk"), (short, 20, "a decode"))
        self._keep_state()
        again = self._sequence("short", short.tokens, np.arange(self._size))
        if self._stateful:  # a new sequence must not see the state that another left in its slot
            self._runtime.apply(Plan(states=(StateCopy(long.state, again.state),)))
        self._step((long, second + 3, "a later chunk"), (again, 7, "a first chunk"))
        whole = self._fork(first)
        inside = self._fork(second)
        restored = self._restored(second)
        self._step(
            (whole, second + 8, "a chunk after a shared prefix"),
            (inside, second + 10, "a chunk after a copied part of a block"),
            (restored, second + 9, "a chunk after a prefix from the host"),
            (long, second + 4, "a decode"),
            (short, 21, "a decode"),
        )
        for _ in range(2):
            self._decode(long, short, whole, inside)
        begun, fresh = (self._sequence(s.name, s.tokens, np.arange(self._size)) for s in (short, long))
        self._step(
            (inside, inside.past + 1, "a decode"),
            (begun, 1, "a first chunk"),
            *((s, s.past + 1, "a decode") for s in (long, whole)),
        )
        # Rows without logits, as in every prefill: the head gets fewer rows than the other layers. An engine asks for
        # one row. The median of so few could come from a row that rounding has sent to another expert.
        last = "the last rows of a chunk"
        self._step((fresh, 19, last), (long, long.past + 1, "a decode"), (again, 20, last), most_logits=8)
        self._decode(begun, fresh)
        return self._rows

    def _decode(self, *sequences: _Sequence) -> None:
        self._step(*((sequence, sequence.past + 1, "a decode") for sequence in sequences))

    def _sequence(self, name: str, tokens: Tokens, order: NDArray[np.int64], past: int = 0) -> _Sequence:
        """Makes a sequence with its own blocks in every family, at different rows in each."""
        tables = [
            (order + (self._made + number) % _SEQUENCES * self._size).astype(np.int32)
            for number in range(len(self._families))
        ]
        self._made += 1
        return _Sequence(name, tokens, tables, self._slot(), past)

    def _slot(self) -> SlotId:
        return SlotId(next(self._slots)) if self._stateful else NO_SLOT

    def _keep_state(self) -> None:
        """Saves the long sequence's current state."""
        if self._stateful:
            kept = self._kept[self._long.past] = self._slot()
            self._runtime.apply(Plan(states=(StateCopy(self._long.state, kept),)))

    def _fork(self, past: int) -> _Sequence:
        """Makes a sequence that shares the long sequence's first positions. A partly filled block is copied."""
        past = self._shared(past)
        fork = self._sequence("long", self._long.tokens, np.arange(self._size), past)
        copies = []
        for number, family in enumerate(self._families):
            theirs, table = self._long.tables[number], fork.tables[number]
            kept, (shared, partly) = (
                family.first_visible(past) // self._block_size,
                divmod(past, self._block_size),
            )
            table[kept:shared] = theirs[kept:shared]
            if partly and kept <= shared:
                source = BlockId(int(theirs[shared]))
                copies.append(BlockCopy(source, BlockId(int(table[shared])), partly, number))
        states = (StateCopy(self._kept[past], fork.state),) if past and self._stateful else ()
        self._runtime.apply(Plan(tuple(copies), states))
        return fork

    def _restored(self, past: int) -> _Sequence:
        """Makes a sequence with the long one's first positions, which were copied to the host and back, as a tier
        does."""
        past = self._shared(past)
        restored = self._sequence("long", self._long.tokens, np.arange(self._size), past)
        for number, family in enumerate(self._families):
            theirs, table = self._long.tables[number], restored.tables[number]
            size = self._block_size
            for first in range(family.first_visible(past) // size * size, past, size):
                tokens, block = min(size, past - first), first // size
                self._copy_by_host(number, int(theirs[block]), int(table[block]), tokens)
        if past and self._stateful:
            self._copy_by_host(len(self._families), self._kept[past], restored.state, 0)
        return restored

    def _copy_by_host(self, family: int, source: int, target: int, tokens: int) -> None:
        kept = self._runtime.read(RowPart(family, source, tokens))
        part = RowPart(family, target, tokens)
        buffers = self._runtime.buffers(part)
        for buffer, bytes in zip(buffers, kept, strict=True):
            buffer[:] = bytes
        self._runtime.place(part, buffers)

    def _shared(self, past: int) -> int:
        """Returns the position at which a sequence resumes that shares the long one's first `past` positions."""
        past = min(past, self._long.past)
        return past if past < len(self._long.tokens) else 0  # at the end nothing would be left to compute

    def _step(self, *wanted: tuple[_Sequence, int, str], most_logits: int = 1 << 30) -> None:
        """Runs one forward that computes each sequence up to the given position, or to its end if that comes
        first. Each has logits of its last rows."""
        work = [(s, min(until, len(s.tokens)), kind) for s, until, kind in wanted]
        work = [(s, until, kind) for s, until, kind in work if until > s.past]
        if not work:
            return
        logits = self._runtime.forward(Batch([self._segment(s, until, most_logits) for s, until, _ in work]))
        row = 0
        for sequence, until, kind in work:
            new = min(until - sequence.past, most_logits)
            if kind != "a decode":
                sequence.prefilled = until
            positions = slice(until - new, until)
            scored = ScoredRows(sequence.name, positions, sequence.prefilled, logits[row : row + new])
            self._rows.setdefault(kind, []).append(scored)
            sequence.past, row = until, row + new

    def _segment(self, sequence: _Sequence, until: int, most_logits: int) -> Segment:
        """Builds a segment, without the blocks that no row will see again."""
        tables = [table.copy() for table in sequence.tables]
        for family, table in zip(self._families, tables, strict=True):
            table[: family.first_visible(sequence.past) // self._block_size] = NO_BLOCK
        tokens = sequence.tokens[sequence.past : until]
        kept = min(len(tokens), most_logits)
        adapter = self._adapter if sequence.name == "long" else ""
        return Segment(tokens, sequence.past, tuple(tables), kept, sequence.state, adapter)
