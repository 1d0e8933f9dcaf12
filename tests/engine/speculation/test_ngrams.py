"""Lookups of earlier occurrences of n-grams."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rootstock.cache.types import Tokens
from rootstock.engine.speculation.ngrams import LONGEST_AGREEMENT, NGRAM, TokenHistory


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def history_of(*values: int) -> TokenHistory:
    history = TokenHistory()
    history.append(tokens(*values))
    return history


def test_the_latest_place_is_found_with_its_agreement() -> None:
    history = history_of(9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 8, 1, 2, 3)
    place = history.find(history.tokens)
    assert place.agreement == 4  # 8 1 2 3, and not 9 1 2 3
    assert history.following(place, 3).tolist() == [5, 7, 8]


def test_unseen_ngrams_are_not_found() -> None:
    history = history_of(1, 2, 3, 4, 5)
    assert history.find(history.tokens) is None
    assert history.find(tokens(2, 3)) is None  # shorter than any n-gram
    assert TokenHistory().find(tokens(1, 2, 3)) is None


def test_a_text_that_repeats_itself_is_guessed_to_go_on_repeating() -> None:
    history = history_of(5, 1, 2, 1, 2, 1, 2, 1)
    place = history.find(history.tokens)
    assert place is not None
    assert history.repeating(place, 5).tolist() == [2, 1, 2, 1, 2]


@given(st.lists(st.integers(0, 3), max_size=120), st.lists(st.integers(1, 30), max_size=30))
def test_the_last_occurrence_is_found_for_any_pieces(values: list[int], pieces: list[int]) -> None:
    history, at = TokenHistory(), 0
    for piece in [*pieces, len(values)]:
        history.append(tokens(*values[at : at + piece]))
        at += piece
    assert history.tokens.tolist() == values
    place = history.find(history.tokens)
    earlier = [p for p in range(NGRAM, len(values)) if values[p - NGRAM : p] == values[-NGRAM:]]
    if place is None:
        assert not earlier or len(values) < NGRAM
        return
    assert place.next == earlier[-1]
    before, end = values[: place.next][::-1], values[::-1]
    pairs = itertools.islice(zip(before, end, strict=False), LONGEST_AGREEMENT)
    assert place.agreement == len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_a_history_that_is_full_forgets_its_older_half() -> None:
    history = TokenHistory(most=1000)
    rng = np.random.default_rng(0)
    runs = [rng.integers(0, 30_000, 90).astype(np.int32) for _ in range(40)]
    for run in runs:
        history.append(run)
        assert history.length <= 1000
        assert history.tokens[-90:].tolist() == run.tolist()
    last, first = history.find(runs[-2][:40]), history.find(runs[0][:40])
    assert last is not None
    assert history.following(last, 50).tolist() == runs[-2][40:].tolist()
    assert first is None
    history.append(rng.integers(0, 30_000, 5000).astype(np.int32))  # more than it can hold at once
    assert history.length <= 1000
