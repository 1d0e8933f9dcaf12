"""What the tier below holds, by content: how far a prompt could be resumed, and what must be loaded for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.helpers import NAMESPACE
from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    SlidingWindow,
)
from rootstock.cache.keys import Namespace
from rootstock.cache.record_identity import Identity, Kind, identify
from rootstock.cache.tier_index import StoredIndex, TierHit
from rootstock.cache.types import Tokens


def ints(*values: int | Sequence[int] | Tokens) -> Tokens:
    return np.concatenate([np.atleast_1d(np.array(value, np.int32)) for value in values])


FULL = FullAttention(layers=2, bytes_per_token=10)
WINDOW = SlidingWindow(layers=3, bytes_per_token=6, window=7)
CHUNK = ChunkedAttention(layers=1, bytes_per_token=4, chunk=8)
STATE = RecurrentState(layers=5, bytes_per_state=100)
SIZE = 4
PROMPT = ints(range(40))


class Disk(StoredIndex):
    """With what a test puts into it."""

    def put(self, family: Family, tokens: Tokens, start: int, namespace: Namespace = NAMESPACE) -> Identity:
        """The family's memory of tokens[start:], or its state after them."""
        kind = Kind.STATE if isinstance(family, RecurrentState) else Kind.BLOCKS
        identity = identify(namespace, family.name, family.layers, namespace.kv_dtype, kind, tokens, start)
        self.add(identity)
        return identity

    def put_blocks(self, family: Family, tokens: Tokens, first: int = 0, size: int = SIZE) -> list[Identity]:
        """Blocks of `tokens` from block index `first` on, the last of which may be filled in part."""
        return [
            self.put(family, tokens[: min(start + size, len(tokens))], start)
            for start in range(first * size, len(tokens), size)
        ]

    def put_state(self, tokens: Tokens) -> Identity:
        return self.put(STATE, tokens, (len(tokens) - 1) // self.block_size * self.block_size)

    def put_checkpoint(self, tokens: Tokens) -> None:
        """What a checkpoint after `tokens` leaves, without full attention."""
        for family in self.families:
            if isinstance(family, RecurrentState):
                self.put_state(tokens)
            elif not isinstance(family, FullAttention):
                self.put_blocks(family, tokens, family.first_visible(len(tokens)) // SIZE)

    def ask(
        self,
        tokens: Tokens,
        resumable: int = 0,
        found: int = 0,
        limit: int | None = None,
        namespace: Namespace = NAMESPACE,
    ) -> TierHit | None:
        return self.tier_hit(tokens, namespace, resumable, found, len(tokens) - 1 if limit is None else limit)


def named(reach: TierHit | None) -> list[tuple[int, int]]:
    """(family, block index) of what is to be loaded."""
    assert reach is not None
    return [(block.family, block.index) for block in reach.blocks]


# -- full attention ----------------------------------------------------------------------------------------------


def test_an_empty_index_reaches_nothing() -> None:
    assert Disk([FULL], SIZE).ask(PROMPT) is None


def test_blocks_in_a_row_from_the_start_are_reached_and_nothing_behind_a_gap() -> None:
    disk = Disk([FULL], SIZE)
    identities = disk.put_blocks(FULL, PROMPT[:24])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert (reach.position, reach.base, reach.found) == (24, 0, 24)
    assert [block.identity for block in reach.blocks] == identities
    assert reach.records == 6
    assert reach.payload_bytes == 240
    disk.remove(identities[3].key)
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 12


def test_a_partial_tail_is_reached_to_its_last_token() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT[:23])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 23
    assert reach.payload_bytes == 230


@pytest.mark.parametrize("agreed", range(1, 24))
def test_a_divergence_is_reached_to_the_token(agreed: int) -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT[:24])
    reach = disk.ask(ints(PROMPT[:agreed], 99, 98))
    assert reach is not None
    assert reach.position == agreed
    assert len(reach.blocks) == -(-agreed // SIZE)


def test_of_several_blocks_at_one_place_the_one_that_agrees_most_is_loaded() -> None:
    disk = Disk([FULL], SIZE)
    disk.put(FULL, ints(0, 1, 9, 9), 0)
    best = disk.put(FULL, ints(0, 1, 2, 9), 0)
    disk.put(FULL, ints(0, 9, 9, 9), 0)
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 3
    assert reach.blocks[0].identity is best


def test_the_last_token_is_left_to_compute() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    for limit in (39, 38, 36, 35, 1):
        reach = disk.ask(PROMPT, limit=limit)
        assert reach is not None
        assert reach.position == limit
        assert len(reach.blocks) == -(-limit // SIZE)
    assert disk.ask(PROMPT, limit=0) is None


def test_what_memory_has_is_not_loaded_but_for_the_block_in_which_it_ends() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    reach = disk.ask(PROMPT, resumable=18, found=18)
    assert reach is not None
    assert (reach.position, reach.base) == (39, 16)
    assert named(reach) == [(0, block) for block in range(4, 10)]


def test_there_is_no_reach_that_is_not_deeper_than_memory() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT[:24])
    assert disk.ask(PROMPT, resumable=24, found=24) is None
    assert disk.ask(PROMPT, resumable=30, found=30) is None
    assert disk.ask(PROMPT, resumable=39, found=39) is None
    reach = disk.ask(PROMPT, resumable=23, found=23)
    assert reach is not None
    assert named(reach) == [(0, 5)]


def test_other_namespaces_dtypes_and_models_are_never_reached() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    for other in (
        Namespace("others", "float32"),
        Namespace("weights", "bfloat16"),
        Namespace("weights", "float32", salt="tenant"),
        Namespace("weights", "float32", rope_regime="yarn"),
        Namespace("weights", "float32", adapter="lora"),
    ):
        assert disk.ask(PROMPT, namespace=other) is None


def test_a_token_before_a_block_that_differs_hides_it() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    reach = disk.ask(ints(PROMPT[:6], 99, PROMPT[7:]))
    assert reach is not None
    assert reach.position == 6


def test_a_digest_alone_is_never_believed() -> None:
    """Another record under the digest of this place, as a collision would put it."""
    disk = Disk([FULL], SIZE)
    first = disk.put(FULL, PROMPT[:4], 0)
    wrong = identify(NAMESPACE, "full", 2, "float32", Kind.BLOCKS, ints(7, 7, 7, 7, 8, 8), 4)
    disk.add(Identity(**{n: getattr(wrong, n) for n in wrong.__dataclass_fields__} | {"parent": first.own}))
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 4


# -- windows, chunks, states -------------------------------------------------------------------------------------


def test_a_window_is_reached_where_its_tail_is_stored() -> None:
    disk = Disk([FULL, WINDOW], SIZE)
    disk.put_blocks(FULL, PROMPT)
    assert disk.ask(PROMPT) is None
    disk.put_checkpoint(PROMPT[:14])
    disk.put_checkpoint(PROMPT[:27])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert (reach.position, reach.base, reach.found) == (27, 0, 39)
    assert named(reach) == [(1, 5), (1, 6)] + [(0, block) for block in range(7)]
    reach = disk.ask(ints(PROMPT[:20], 99))
    assert reach is not None
    assert reach.position == 14


def test_a_window_is_loaded_where_memory_has_the_full_attention() -> None:
    disk = Disk([FULL, WINDOW], SIZE)
    disk.put_checkpoint(PROMPT[:27])
    assert disk.ask(PROMPT) is None
    assert disk.ask(PROMPT, found=25) is None
    shorter = disk.ask(PROMPT, found=26)
    assert shorter is not None
    assert (shorter.position, shorter.base) == (26, 26)
    reach = disk.ask(PROMPT, resumable=9, found=30)
    assert reach is not None
    assert (reach.position, reach.base) == (27, 27)
    assert named(reach) == [(1, 5), (1, 6)]
    assert reach.payload_bytes == 7 * 6


def test_a_model_of_windows_alone_needs_its_tail_and_nothing_else() -> None:
    disk = Disk([WINDOW], SIZE)
    disk.put_checkpoint(PROMPT[:27])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 27
    assert named(reach) == [(0, 5), (0, 6)]


def test_a_chunk_is_reached_where_what_follows_its_beginning_is_stored() -> None:
    disk = Disk([FULL, CHUNK], SIZE)
    disk.put_blocks(FULL, PROMPT[:31])
    disk.put_checkpoint(PROMPT[:30])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 30
    assert named(reach)[:2] == [(1, 6), (1, 7)]


def test_where_a_chunk_begins_nothing_of_it_need_be_stored() -> None:
    disk = Disk([FULL, CHUNK], SIZE)
    disk.put_blocks(FULL, PROMPT[:31])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 24
    assert named(reach) == [(0, block) for block in range(6)]


def test_a_state_is_reached_at_exactly_its_position() -> None:
    disk = Disk([FULL, STATE], SIZE)
    disk.put_blocks(FULL, PROMPT)
    state = disk.put_state(PROMPT[:22])
    for limit, position in ((39, 22), (22, 22), (21, None)):
        reach = disk.ask(PROMPT, limit=limit)
        assert (None if reach is None else reach.position) == position
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.state is state
    assert reach.records == 6 + 1
    assert reach.payload_bytes == 24 * 10 + 100
    assert disk.ask(ints(PROMPT[:21], 99, 98)) is None


def test_of_states_the_deepest_is_reached_that_the_full_attention_goes_to() -> None:
    disk = Disk([FULL, STATE], SIZE)
    blocks = disk.put_blocks(FULL, PROMPT)
    for position in (6, 7, 20, 24, 33):
        disk.put_state(PROMPT[:position])
    disk.remove(blocks[6].key)
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 24
    assert disk.ask(PROMPT, resumable=24, found=24) is None
    reach = disk.ask(PROMPT, resumable=20, found=39)
    assert reach is not None
    assert reach.position == 33
    assert reach.blocks == ()


def test_a_model_of_states_alone_needs_one_record() -> None:
    disk = Disk([STATE], SIZE)
    disk.put_state(PROMPT[:33])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert (reach.position, reach.records) == (33, 1)


def test_every_family_must_be_there() -> None:
    families: list[Family] = [FULL, WINDOW, CHUNK, STATE]
    for missing in families:
        disk = Disk(families, SIZE)
        disk.put_blocks(FULL, PROMPT)
        disk.put_checkpoint(PROMPT[:27])
        found = disk.ask(PROMPT)
        assert found is not None
        assert found.position == 27
        for block in found.blocks:
            if families[block.family] is missing:
                disk.remove(block.identity.key)
        if missing is STATE:
            assert found.state is not None
            disk.remove(found.state.key)
        assert disk.ask(PROMPT) is None


# -- the index itself --------------------------------------------------------------------------------------------


def test_what_is_added_twice_is_there_once_and_removed_once() -> None:
    disk = Disk([FULL], SIZE)
    identity = disk.put(FULL, PROMPT[:4], 0)
    version = disk.version
    disk.add(identity)
    assert len(disk) == 1
    assert disk.version == version
    assert identity.key in disk
    disk.remove(identity.key)
    disk.remove(identity.key)
    assert len(disk) == 0
    assert disk.ask(PROMPT) is None


def test_clearing_leaves_nothing() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    disk.clear()
    assert len(disk) == 0
    assert disk.some(5) == []
    assert disk.ask(PROMPT) is None


def test_some_are_those_that_were_added_last() -> None:
    disk = Disk([FULL], SIZE)
    identities = disk.put_blocks(FULL, PROMPT)
    assert disk.some(3) == identities[-3:]
    assert disk.some(99) == identities


def test_records_that_no_request_of_this_model_can_ask_for_are_counted_and_left_out() -> None:
    disk = Disk([FULL], SIZE)
    disk.put(WINDOW, PROMPT[:4], 0)
    disk.put(FullAttention(layers=9, bytes_per_token=10), PROMPT[:4], 0)
    disk.put(STATE, PROMPT[:4], 0)
    assert (len(disk), disk.foreign_records) == (0, 3)


def test_records_that_an_older_version_compressed_are_foreign() -> None:
    disk = Disk([FULL, STATE], SIZE)
    block, state = Disk([FULL], SIZE).put(FULL, PROMPT[:6], 4), Disk([STATE], SIZE).put_state(PROMPT[:4])
    for record in (block, state):
        disk.add(replace(record, dtype=f"{NAMESPACE.kv_dtype}/int8"))
    assert (len(disk), disk.foreign_records) == (0, 2)
    assert not disk.covers(0, block.parent, PROMPT[4:6]), "the exact block would not be stored"
    assert disk.ask(PROMPT) is None


def test_a_block_is_covered_by_one_that_begins_with_its_tokens() -> None:
    disk = Disk([FULL, WINDOW], SIZE)
    identity = disk.put(FULL, PROMPT[:7], 4)
    assert disk.covers(0, identity.parent, PROMPT[4:6])
    assert disk.covers(0, identity.parent, PROMPT[4:7])
    assert not disk.covers(0, identity.parent, PROMPT[4:8])
    assert not disk.covers(0, identity.parent, ints(4, 99))
    assert not disk.covers(1, identity.parent, PROMPT[4:6])


def test_what_lies_along_a_prompt_beyond_a_position_is_named() -> None:
    disk = Disk([FULL, STATE], SIZE)
    blocks = disk.put_blocks(FULL, PROMPT[:16])
    state = disk.put_state(PROMPT[:14])
    elsewhere = disk.put(FULL, ints(PROMPT[:8], 50, 51, 52, 53), 8)
    assert set(disk.keys_along(PROMPT, NAMESPACE, 10)) == {blocks[2].key, blocks[3].key, state.key}
    assert set(disk.keys_along(PROMPT, NAMESPACE, 12)) == {blocks[3].key, state.key}
    assert disk.keys_along(PROMPT, NAMESPACE, 16) == []
    assert elsewhere.key in disk.keys_along(ints(PROMPT[:8], 50), NAMESPACE, 8)


# -- other block sizes -------------------------------------------------------------------------------------------


def test_records_of_larger_blocks_hide_nothing_that_can_be_reached() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT, size=8)
    assert disk.ask(PROMPT) is None
    disk.put_blocks(FULL, PROMPT[:12])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 12


def test_records_of_smaller_blocks_are_used_where_they_begin_a_block() -> None:
    disk = Disk([FULL], 8)
    disk.put_blocks(FULL, PROMPT, size=4)
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 4


def test_a_state_stored_with_another_block_size_does_not_keep_its_successor_out() -> None:
    disk = Disk([STATE], 8)
    disk.put(STATE, PROMPT[:7], 4)  # found from a position at which no block of ours begins
    assert disk.ask(PROMPT) is None
    disk.put_state(PROMPT[:7])
    reach = disk.ask(PROMPT)
    assert reach is not None
    assert reach.position == 7


# -- against a search of every position --------------------------------------------------------------------------

MODELS: list[list[Family]] = [
    [FULL],
    [FULL, WINDOW],
    [FULL, STATE],
    [FULL, CHUNK],
    [FULL, WINDOW, CHUNK, STATE],
    [WINDOW],
    [STATE],
    [
        FULL,
        SlidingWindow(layers=1, bytes_per_token=1, window=2),
        SlidingWindow(layers=2, bytes_per_token=1, window=11),
    ],
]


def deepest(
    families: Sequence[Family],
    stored: Sequence[Identity],
    tokens: Tokens,
    resumable: int,
    found: int,
    limit: int,
) -> int | None:
    """By trying every position."""

    def block_reaches(family: Family, start: int, end: int) -> bool:
        return any(
            identity.family == family.name
            and identity.start == start
            and identity.end >= end
            and len(identity.tokens) <= SIZE
            and (whole[identity.key][:end] == tokens[:end]).all()
            for identity in stored
        )

    def resumes(family: Family, position: int) -> bool:
        if isinstance(family, RecurrentState):
            return any(
                identity.kind is Kind.STATE
                and identity.end == position
                and (whole[identity.key] == tokens[:position]).all()
                for identity in stored
            )
        first = family.first_visible(position)
        if isinstance(family, FullAttention):
            first = min(found, position)
        blocks = range(first // SIZE, -(-position // SIZE)) if first < position else ()
        return all(block_reaches(family, block * SIZE, min(position, (block + 1) * SIZE)) for block in blocks)

    whole = WHOLE
    for position in range(min(limit, len(tokens)), resumable, -1):
        if all(resumes(family, position) for family in families):
            return position
    return None


WHOLE: dict[bytes, Tokens] = {}  # the tokens up to the end of each record, by its key


@pytest.mark.parametrize("families", MODELS, ids=lambda fs: "+".join(f.name for f in fs))
def test_the_deepest_position_is_reached_that_can_be_resumed_at(families: list[Family]) -> None:
    rng = np.random.default_rng(len(families))
    reached = 0
    for _ in range(400):
        disk = Disk(families, SIZE)
        stored: list[Identity] = []
        trunk = rng.integers(0, 2, 40).astype(np.int32)
        prompts = []
        for _ in range(3):
            tokens = trunk[: int(rng.integers(1, 40))]
            tokens = np.concatenate((tokens, rng.integers(0, 2, 6).astype(np.int32)))
            prompts.append(tokens)
            before = len(stored)
            for family in families:
                if isinstance(family, FullAttention):
                    stored += disk.put_blocks(family, tokens)
                elif isinstance(family, RecurrentState):
                    stored.append(disk.put_state(tokens))
                else:
                    first = family.first_visible(len(tokens)) // SIZE
                    stored += disk.put_blocks(family, tokens, first)
            for identity in stored[before:]:
                WHOLE[identity.key] = tokens[: identity.end]
        if rng.random() < 0.5:  # the disk has evicted some
            for identity in [i for i in stored if rng.random() < 0.1]:
                disk.remove(identity.key)
                stored = [other for other in stored if other.key != identity.key]
        prompt = prompts[int(rng.integers(3))][: int(rng.integers(1, 45))]
        prompt = np.concatenate((prompt, rng.integers(0, 2, 8).astype(np.int32)))
        limit = len(prompt) - 1
        found = int(rng.integers(0, len(prompt))) if rng.random() < 0.4 else 0
        resumable = int(rng.integers(0, found + 1)) if rng.random() < 0.5 else 0
        reach = disk.ask(prompt, resumable, found, limit)
        expected = deepest(families, stored, prompt, resumable, min(found, limit), limit)
        assert (None if reach is None else reach.position) == expected
        reached += reach is not None
    assert reached > 50


@pytest.mark.parametrize(
    "wrong", [{"dtype": "bfloat16:bfloat16"}, {"namespace": bytes(16)}, {"start": 8}], ids=str
)
def test_a_record_that_calls_itself_something_else_is_not_asked_for(wrong: dict[str, Any]) -> None:
    """It would be loaded under that name, and then be right."""
    disk = Disk([FULL], SIZE)
    identity = disk.put(FULL, PROMPT[:4], 0)
    disk.remove(identity.key)
    disk.add(replace(identity, **wrong))
    assert disk.tier_hit(PROMPT, NAMESPACE, 0, 0, len(PROMPT) - 1) is None
