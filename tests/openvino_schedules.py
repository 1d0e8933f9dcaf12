"""Random schedules of a paged graph: chunks, batches, forks, copies and rows restored from the host, against the
exported graph in one pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rootstock.cache.families import RecurrentState, token_families
from rootstock.cache.plan import BlockCopy, Plan, RowPart, RowsReturned, StateCopy
from rootstock.cache.types import NO_BLOCK, NO_SLOT, BlockId, SlotId, Tokens
from rootstock.config import ModelConfig
from rootstock.runtime.base import Batch, Logits, Segment
from rootstock.runtime.openvino.graph import PAGE_TOKENS
from rootstock.runtime.openvino.load import exported_model, load_model
from rootstock.runtime.openvino.runner import OpenVinoRuntime
from rootstock.runtime.openvino.self_check import ExportedModel
from rootstock.runtime.trial import largest_difference

MOST_TOKENS = 150
_MOST_NEW = 40  # tokens of a fork behind its parent's
_SEQUENCES, _BLOCKS = 6, 5 * 8


@dataclass(slots=True)
class _Sequence:
    tokens: Tokens
    expected: Logits
    tables: list[list[int]]  # of each token family; NO_BLOCK: the window has left it
    state: int
    past: int = 0


@dataclass(slots=True)
class Schedules:
    """A model in float32, and the largest difference of a logit of all schedules that it has run, in standard
    deviations."""

    folder: Path
    kv_dtype: str = "auto"
    runtime: OpenVinoRuntime = field(init=False)
    largest: float = 0.0
    rows: int = 0  # that were compared
    operations: dict[str, int] = field(default_factory=dict)
    _own: ExportedModel = field(init=False)
    _free: list[list[int]] = field(init=False)
    _live: list[_Sequence] = field(default_factory=list)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        config = ModelConfig(str(self.folder), runtime="openvino", dtype="float32")
        self.runtime = load_model(replace(config, kv_dtype=self.kv_dtype))
        self._own = exported_model(config, self.folder, "float32")
        families = self.runtime.description.families
        rows = [_SEQUENCES + 2 if isinstance(each, RecurrentState) else _BLOCKS for each in families]
        self.runtime.allocate(rows, PAGE_TOKENS)
        self._free = [list(range(count)) for count in rows]

    def run(self, seed: int, steps: int = 24) -> None:
        """Runs a schedule. Rows of earlier ones are used again, as they are."""
        self._random = random.Random(seed)
        for free in self._free:
            self._random.shuffle(free)
        for _ in range(steps):
            kinds = [self._begin, self._fork, self._restore, self._end, *[self._step] * 4]
            act = self._random.choice(kinds) if self._live else self._begin
            if act():
                name = act.__name__.strip("_")
                self.operations[name] = self.operations.get(name, 0) + 1
        while self._live:
            self._end()

    def whole(self, tokens: Tokens) -> Logits:
        """Computes the logits of all tokens in one forward."""
        self._random = random.Random(0)
        return self._alone(tokens, [len(tokens)])

    def three_ways(self) -> tuple[Logits, Logits, Logits]:
        """Computes the logits of one prompt alone, beside two others, and in chunks."""
        self._random = random.Random(0)
        vocabulary = self.runtime.description.vocab_size
        tokens, *others = (self._tokens(count, vocabulary) for count in (110, 70, 1))
        alone, chunked = self._alone(tokens, [110]), self._alone(tokens, [1, 33, 64, 65, 110])
        batch = [self._sequence(each) for each in (others[0], tokens, others[1])]
        self._live += batch
        logits = self.runtime.forward(Batch([self._all_of(each, len(each.tokens)) for each in batch]))
        while self._live:
            self._end()
        return alone, logits[70:180], chunked

    def _alone(self, tokens: Tokens, ends: Sequence[int]) -> Logits:
        self._live = [self._sequence(tokens)]
        parts = []
        for end in ends:
            parts.append(self.runtime.forward(Batch([self._all_of(self._live[0], end)])))
            self._live[0].past = end
        self._end()
        return np.concatenate(parts)

    # -- operations; each returns whether it was possible

    def _begin(self) -> bool:
        if len(self._live) == _SEQUENCES:
            return False
        vocabulary = self.runtime.description.vocab_size
        tokens = self._tokens(self._random.randrange(2, MOST_TOKENS), vocabulary)
        self._live.append(self._sequence(tokens))
        return True

    def _step(self) -> bool:
        waiting = [each for each in self._live if each.past < len(each.tokens)]
        chosen = self._random.sample(waiting, min(len(waiting), self._random.randrange(1, 5)))
        segments = [self._segment(each) for each in chosen]
        if not segments:
            return False
        logits, row = self.runtime.forward(Batch(segments)), 0
        for each, segment in zip(chosen, segments, strict=True):
            each.past += len(segment.tokens)
            count = segment.logits_to_keep
            if count:
                ours, own = logits[row : row + count], each.expected[each.past - count : each.past]
                self.largest = max(self.largest, largest_difference(ours, own))
                self.rows, row = self.rows + count, row + count
            self._leave_windows(each)
        return True

    def _fork(self) -> bool:
        """Lets another prompt resume where a sequence stands, in copies of its blocks and its state."""
        begun = [each for each in self._live if 0 < each.past <= MOST_TOKENS - _MOST_NEW]
        if not begun or len(self._live) == _SEQUENCES:
            return False
        parent = self._random.choice(begun)
        new = self._tokens(self._random.randrange(1, _MOST_NEW), self.runtime.description.vocab_size)
        child = self._sequence(np.concatenate((parent.tokens[: parent.past], new)), parent.past)
        copies = []
        for family, table in enumerate(child.tables):
            theirs = parent.tables[family]
            for number in range(-(-parent.past // PAGE_TOKENS)):
                tokens = min(PAGE_TOKENS, parent.past - number * PAGE_TOKENS)
                if theirs[number] == NO_BLOCK:
                    self._release(family, [table[number]])
                    table[number] = NO_BLOCK
                else:
                    copies.append(BlockCopy(BlockId(theirs[number]), BlockId(table[number]), tokens, family))
        states = (StateCopy(SlotId(parent.state), SlotId(child.state)),) if child.state != NO_SLOT else ()
        self.runtime.apply(Plan(tuple(copies), states))
        self._live.append(child)
        return True

    def _restore(self) -> bool:
        """Copies a sequence to the host and from there to other rows, as a tier does."""
        begun = [each for each in self._live if each.past]
        if not begun:
            return False
        each = self._random.choice(begun)
        for family, table in enumerate(each.tables):
            for number in range(-(-each.past // PAGE_TOKENS)):
                if table[number] != NO_BLOCK:
                    tokens = min(PAGE_TOKENS, each.past - number * PAGE_TOKENS)
                    table[number] = self._moved(family, table[number], tokens)
        if each.state != NO_SLOT:
            each.state = self._moved(len(each.tables), each.state, 0)
        return True

    def _end(self) -> bool:
        if not self._live:
            return False
        ended = self._live.pop(self._random.randrange(len(self._live)))
        for family, table in enumerate(ended.tables):
            self._release(family, [row for row in table if row != NO_BLOCK])
        if ended.state != NO_SLOT:
            self._release(len(ended.tables), [ended.state])
        return True

    # -- inside

    def _tokens(self, count: int, vocabulary: int) -> Tokens:
        return np.array([self._random.randrange(vocabulary) for _ in range(count)], np.int32)

    def _sequence(self, tokens: Tokens, past: int = 0) -> _Sequence:
        families = self.runtime.description.families
        blocks = -(-len(tokens) // PAGE_TOKENS)
        tables = [[self._free[n].pop() for _ in range(blocks)] for n in range(len(token_families(families)))]
        state = self._free[-1].pop() if len(tables) < len(families) else NO_SLOT
        return _Sequence(tokens, self._own.in_one_pass(tokens), tables, state, past)

    def _segment(self, each: _Sequence) -> Segment:
        left = len(each.tokens) - each.past
        count = self._random.choice([1, min(left, self._random.randrange(1, 60)), left])
        kept = self._random.choice([0, 1, count])
        tables = tuple(np.array(table, np.int32) for table in each.tables)
        tokens = each.tokens[each.past : each.past + count]
        return Segment(tokens, each.past, tables, kept, SlotId(each.state))

    def _all_of(self, each: _Sequence, end: int) -> Segment:
        tables = tuple(np.array(table, np.int32) for table in each.tables)
        tokens = each.tokens[each.past : end]
        return Segment(tokens, each.past, tables, len(tokens), SlotId(each.state))

    def _leave_windows(self, each: _Sequence) -> None:
        for family, (rule, table) in enumerate(
            zip(token_families(self.runtime.description.families), each.tables, strict=True)
        ):
            for number in range(rule.first_visible(each.past) // PAGE_TOKENS):
                if table[number] != NO_BLOCK:
                    self._release(family, [table[number]])
                    table[number] = NO_BLOCK

    def _moved(self, family: int, row: int, tokens: int) -> int:
        kept = [buffer.copy() for buffer in self.runtime.read(RowPart(family, row, tokens))]
        target = self._free[family].pop(0)
        self._release(family, [row])
        part = RowPart(family, target, tokens)
        buffers = self.runtime.buffers(part)
        for buffer, content in zip(buffers, kept, strict=True):
            buffer[:] = content
        self.runtime.place(part, buffers)
        return target

    def _release(self, family: int, rows: Sequence[int]) -> None:
        if rows and self._random.random() < 0.5:  # else the next owner finds them as they were
            returned = RowsReturned(family, np.array(rows, np.int32))
            self.runtime.apply(Plan(returned=(returned,)))
        self._free[family] += rows


def reference_difference(schedules: Schedules) -> float:
    """Returns the largest difference to the logits of transformers, beside the export, of one prefill."""
    reference = np.load(schedules.folder / "reference.npz")
    logits = schedules.whole(reference["ids"])
    return largest_difference(logits, reference["logits"])
