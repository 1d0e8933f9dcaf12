"""Index of stored records: the deepest position at which a prompt could resume, and the records to load for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.helpers import NAMESPACE, ints
from rootstock.cache.families import ChunkedAttention, Family, FullAttention, RecurrentState, SlidingWindow
from rootstock.cache.keys import Identity, Namespace, RecordKind, Scope, identify
from rootstock.cache.tier_index import StoredIndex, TierHit
from rootstock.cache.types import Tokens

FULL = FullAttention(layers=2, bytes_per_token=10)
WINDOW = SlidingWindow(layers=3, bytes_per_token=6, window=7)
CHUNK = ChunkedAttention(layers=1, bytes_per_token=4, chunk=8)
STATE = RecurrentState(layers=5, bytes_per_state=100)
SIZE = 4
PROMPT = ints(range(40))


class Disk(StoredIndex):
    """Index that a test fills with records."""

    def put(self, family: Family, tokens: Tokens, start: int, namespace: Namespace = NAMESPACE) -> Identity:
        """Adds the family's memory of tokens[start:], or its state after them."""
        kind = RecordKind.STATE if isinstance(family, RecurrentState) else RecordKind.BLOCKS
        identity = identify(namespace, family.name, family.layers, namespace.kv_dtype, kind, tokens, start)
        self.add(identity)
        return identity

    def put_blocks(self, family: Family, tokens: Tokens, first: int = 0, size: int = SIZE) -> list[Identity]:
        """Adds the blocks of `tokens` from block index `first` on, of which the last may be partly filled."""
        return [
            self.put(family, tokens[: min(start + size, len(tokens))], start)
            for start in range(first * size, len(tokens), size)
        ]

    def put_state(self, tokens: Tokens) -> Identity:
        return self.put(STATE, tokens, (len(tokens) - 1) // self.block_size * self.block_size)

    def put_checkpoint(self, tokens: Tokens) -> None:
        """Adds the records of a checkpoint after `tokens`, without full attention."""
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
        return self.tier_hit(
            tokens, Scope(namespace), resumable, found, len(tokens) - 1 if limit is None else limit
        )

    def hit(self, tokens: Tokens, resumable: int = 0, found: int = 0, limit: int | None = None) -> TierHit:
        hit = self.ask(tokens, resumable, found, limit)
        assert hit is not None
        return hit


def named(hit: TierHit) -> list[tuple[int, int]]:
    """Returns (family, block index) of each block to load."""
    return [(block.family, block.index) for block in hit.blocks]


# -- full attention ----------------------------------------------------------------------------------------------


def test_an_empty_index_has_no_hit() -> None:
    assert Disk([FULL], SIZE).ask(PROMPT) is None


def test_consecutive_blocks_from_the_start_are_hit_up_to_the_first_gap() -> None:
    disk = Disk([FULL], SIZE)
    identities = disk.put_blocks(FULL, PROMPT[:24])
    hit = disk.hit(PROMPT)
    assert (hit.position, hit.base, hit.found) == (24, 0, 24)
    assert [block.identity for block in hit.blocks] == identities
    assert hit.records == 6
    assert hit.payload_bytes == 240
    disk.remove(identities[3].key)
    assert disk.hit(PROMPT).position == 12


def test_a_partly_filled_last_block_is_hit_up_to_its_last_token() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT[:23])
    hit = disk.hit(PROMPT)
    assert hit.position == 23
    assert hit.payload_bytes == 230


@pytest.mark.parametrize("agreed", range(1, 24))
def test_a_hit_ends_at_the_token_of_divergence(agreed: int) -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT[:24])
    hit = disk.hit(ints(PROMPT[:agreed], 99, 98))
    assert hit.position == agreed
    assert len(hit.blocks) == -(-agreed // SIZE)


def test_of_several_blocks_at_one_position_the_one_that_agrees_most_is_loaded() -> None:
    disk = Disk([FULL], SIZE)
    disk.put(FULL, ints(0, 1, 9, 9), 0)
    best = disk.put(FULL, ints(0, 1, 2, 9), 0)
    disk.put(FULL, ints(0, 9, 9, 9), 0)
    hit = disk.hit(PROMPT)
    assert hit.position == 3
    assert hit.blocks[0].identity is best


def test_the_last_token_is_left_to_compute() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    for limit in (39, 38, 36, 35, 1):
        hit = disk.hit(PROMPT, limit=limit)
        assert hit.position == limit
        assert len(hit.blocks) == -(-limit // SIZE)
    assert disk.ask(PROMPT, limit=0) is None


def test_blocks_in_memory_are_not_loaded_except_the_last_partly_filled_one() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    hit = disk.hit(PROMPT, resumable=18, found=18)
    assert (hit.position, hit.base) == (39, 16)
    assert named(hit) == [(0, block) for block in range(4, 10)]


def test_a_hit_is_deeper_than_memory() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT[:24])
    assert disk.ask(PROMPT, resumable=24, found=24) is None
    assert disk.ask(PROMPT, resumable=30, found=30) is None
    assert disk.ask(PROMPT, resumable=39, found=39) is None
    hit = disk.hit(PROMPT, resumable=23, found=23)
    assert named(hit) == [(0, 5)]


def test_records_of_other_namespaces_dtypes_and_models_are_never_hit() -> None:
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


def test_a_block_behind_a_different_token_is_not_hit() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    assert disk.hit(ints(PROMPT[:6], 99, PROMPT[7:])).position == 6


def test_an_equal_digest_with_other_tokens_is_not_hit() -> None:
    """Adds another record under the digest of this position, as a collision would."""
    disk = Disk([FULL], SIZE)
    first = disk.put(FULL, PROMPT[:4], 0)
    wrong = identify(NAMESPACE, "full", 2, "float32", RecordKind.BLOCKS, ints(7, 7, 7, 7, 8, 8), 4)
    disk.add(Identity(**{n: getattr(wrong, n) for n in wrong.__dataclass_fields__} | {"parent": first.own}))
    assert disk.hit(PROMPT).position == 4


# -- windows, chunks, states -------------------------------------------------------------------------------------


def test_a_window_is_hit_where_its_blocks_are_stored() -> None:
    disk = Disk([FULL, WINDOW], SIZE)
    disk.put_blocks(FULL, PROMPT)
    assert disk.ask(PROMPT) is None
    disk.put_checkpoint(PROMPT[:14])
    disk.put_checkpoint(PROMPT[:27])
    hit = disk.hit(PROMPT)
    assert (hit.position, hit.base, hit.found) == (27, 0, 39)
    assert named(hit) == [(1, 5), (1, 6)] + [(0, block) for block in range(7)]
    assert disk.hit(ints(PROMPT[:20], 99)).position == 14


def test_a_window_is_loaded_where_memory_has_the_full_attention() -> None:
    disk = Disk([FULL, WINDOW], SIZE)
    disk.put_checkpoint(PROMPT[:27])
    assert disk.ask(PROMPT) is None
    assert disk.ask(PROMPT, found=25) is None
    shorter = disk.hit(PROMPT, found=26)
    assert (shorter.position, shorter.base) == (26, 26)
    hit = disk.hit(PROMPT, resumable=9, found=30)
    assert (hit.position, hit.base) == (27, 27)
    assert named(hit) == [(1, 5), (1, 6)]
    assert hit.payload_bytes == 7 * 6


def test_a_model_of_windows_alone_needs_its_window_blocks_only() -> None:
    disk = Disk([WINDOW], SIZE)
    disk.put_checkpoint(PROMPT[:27])
    hit = disk.hit(PROMPT)
    assert hit.position == 27
    assert named(hit) == [(0, 5), (0, 6)]


def test_a_chunk_is_hit_where_its_blocks_since_the_start_are_stored() -> None:
    disk = Disk([FULL, CHUNK], SIZE)
    disk.put_blocks(FULL, PROMPT[:31])
    disk.put_checkpoint(PROMPT[:30])
    hit = disk.hit(PROMPT)
    assert hit.position == 30
    assert named(hit)[:2] == [(1, 6), (1, 7)]


def test_the_start_of_a_chunk_is_hit_without_stored_blocks_of_it() -> None:
    disk = Disk([FULL, CHUNK], SIZE)
    disk.put_blocks(FULL, PROMPT[:31])
    hit = disk.hit(PROMPT)
    assert hit.position == 24
    assert named(hit) == [(0, block) for block in range(6)]


def test_a_state_is_hit_at_exactly_its_position() -> None:
    disk = Disk([FULL, STATE], SIZE)
    disk.put_blocks(FULL, PROMPT)
    state = disk.put_state(PROMPT[:22])
    for limit, position in ((39, 22), (22, 22), (21, None)):
        hit = disk.ask(PROMPT, limit=limit)
        assert (None if hit is None else hit.position) == position
    hit = disk.hit(PROMPT)
    assert hit.state is state
    assert hit.records == 6 + 1
    assert hit.payload_bytes == 24 * 10 + 100
    assert disk.ask(ints(PROMPT[:21], 99, 98)) is None


def test_the_deepest_state_within_the_full_attention_is_hit() -> None:
    disk = Disk([FULL, STATE], SIZE)
    blocks = disk.put_blocks(FULL, PROMPT)
    for position in (6, 7, 20, 24, 33):
        disk.put_state(PROMPT[:position])
    disk.remove(blocks[6].key)
    assert disk.hit(PROMPT).position == 24
    assert disk.ask(PROMPT, resumable=24, found=24) is None
    hit = disk.hit(PROMPT, resumable=20, found=39)
    assert hit.position == 33
    assert hit.blocks == ()


def test_a_model_of_states_alone_needs_one_record() -> None:
    disk = Disk([STATE], SIZE)
    disk.put_state(PROMPT[:33])
    hit = disk.hit(PROMPT)
    assert (hit.position, hit.records) == (33, 1)


def test_records_of_every_family_are_needed() -> None:
    families: list[Family] = [FULL, WINDOW, CHUNK, STATE]
    for missing in families:
        disk = Disk(families, SIZE)
        disk.put_blocks(FULL, PROMPT)
        disk.put_checkpoint(PROMPT[:27])
        found = disk.hit(PROMPT)
        assert found.position == 27
        for block in found.blocks:
            if families[block.family] is missing:
                disk.remove(block.identity.key)
        if missing is STATE:
            assert found.state is not None
            disk.remove(found.state.key)
        assert disk.ask(PROMPT) is None


# -- the index itself --------------------------------------------------------------------------------------------


def test_a_record_that_is_added_twice_is_indexed_once() -> None:
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


def test_clear_removes_all_records() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT)
    disk.clear()
    assert len(disk) == 0
    assert disk.some(5) == []
    assert disk.ask(PROMPT) is None


def test_some_returns_the_records_that_were_added_last() -> None:
    disk = Disk([FULL], SIZE)
    identities = disk.put_blocks(FULL, PROMPT)
    assert disk.some(3) == identities[-3:]
    assert disk.some(99) == identities


def test_records_of_other_models_are_counted_and_not_indexed() -> None:
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


def test_keys_along_a_prompt_beyond_a_position() -> None:
    disk = Disk([FULL, STATE], SIZE)
    blocks = disk.put_blocks(FULL, PROMPT[:16])
    state = disk.put_state(PROMPT[:14])
    elsewhere = disk.put(FULL, ints(PROMPT[:8], 50, 51, 52, 53), 8)
    assert set(disk.keys_along(PROMPT, Scope(NAMESPACE), 10)) == {blocks[2].key, blocks[3].key, state.key}
    assert set(disk.keys_along(PROMPT, Scope(NAMESPACE), 12)) == {blocks[3].key, state.key}
    assert disk.keys_along(PROMPT, Scope(NAMESPACE), 16) == []
    assert elsewhere.key in disk.keys_along(ints(PROMPT[:8], 50), Scope(NAMESPACE), 8)


# -- other block sizes -------------------------------------------------------------------------------------------


def test_records_of_larger_blocks_hide_no_hit() -> None:
    disk = Disk([FULL], SIZE)
    disk.put_blocks(FULL, PROMPT, size=8)
    assert disk.ask(PROMPT) is None
    disk.put_blocks(FULL, PROMPT[:12])
    assert disk.hit(PROMPT).position == 12


def test_records_of_smaller_blocks_are_used_where_they_begin_a_block() -> None:
    disk = Disk([FULL], 8)
    disk.put_blocks(FULL, PROMPT, size=4)
    assert disk.hit(PROMPT).position == 4


def test_a_state_stored_with_another_block_size_can_be_stored_again() -> None:
    disk = Disk([STATE], 8)
    disk.put(STATE, PROMPT[:7], 4)  # found from a position at which no block of ours begins
    assert disk.ask(PROMPT) is None
    disk.put_state(PROMPT[:7])
    assert disk.hit(PROMPT).position == 7


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
    """Finds the deepest resumable position by trying every position."""

    def is_block_stored(family: Family, start: int, end: int) -> bool:
        return any(
            identity.family == family.name
            and identity.start == start
            and identity.end >= end
            and len(identity.tokens) <= SIZE
            and (WHOLE[identity.key][:end] == tokens[:end]).all()
            for identity in stored
        )

    def resumes(family: Family, position: int) -> bool:
        if isinstance(family, RecurrentState):
            return any(
                identity.kind is RecordKind.STATE
                and identity.end == position
                and (WHOLE[identity.key] == tokens[:position]).all()
                for identity in stored
            )
        first = family.first_visible(position)
        if isinstance(family, FullAttention):
            first = min(found, position)
        blocks = range(first // SIZE, -(-position // SIZE)) if first < position else ()
        return all(
            is_block_stored(family, block * SIZE, min(position, (block + 1) * SIZE)) for block in blocks
        )

    for position in range(min(limit, len(tokens)), resumable, -1):
        if all(resumes(family, position) for family in families):
            return position
    return None


WHOLE: dict[bytes, Tokens] = {}  # the tokens up to the end of each record, by its key


@pytest.mark.parametrize("families", MODELS, ids=lambda fs: "+".join(f.name for f in fs))
def test_the_hit_is_the_deepest_resumable_position(families: list[Family]) -> None:
    rng = np.random.default_rng(len(families))
    hits = 0
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
        hit = disk.ask(prompt, resumable, found, limit)
        expected = deepest(families, stored, prompt, resumable, min(found, limit), limit)
        assert (None if hit is None else hit.position) == expected
        hits += hit is not None
    assert hits > 50


@pytest.mark.parametrize(
    "wrong", [{"dtype": "bfloat16:bfloat16"}, {"namespace": bytes(16)}, {"start": 8}], ids=str
)
def test_a_record_with_another_identity_is_not_hit(wrong: dict[str, Any]) -> None:
    """The tier would load it under that identity, and would find it intact."""
    disk = Disk([FULL], SIZE)
    identity = disk.put(FULL, PROMPT[:4], 0)
    disk.remove(identity.key)
    disk.add(replace(identity, **wrong))
    assert disk.tier_hit(PROMPT, Scope(NAMESPACE), 0, 0, len(PROMPT) - 1) is None
