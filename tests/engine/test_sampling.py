from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rootstock.engine.logits_processors import ResolvedSampling, _nucleus, best_ids
from rootstock.engine.sampling import Sampler, _logprob, score_prompt
from rootstock.errors import EngineError, SamplingFailed

VOCAB = 12
NO_PROMPT = np.array([0], dtype=np.int32)


def logits_of(probabilities: list[float]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


def rows(seed: int, vocab: int = VOCAB, count: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (count, vocab)).astype(np.float32)


def sampler(params: ResolvedSampling, vocab: int = VOCAB, seed: int = 0, **more: object) -> Sampler:
    return Sampler(params, more.pop("prompt", NO_PROMPT), vocab, seed, **more)  # type: ignore[arg-type]


def tokens_of(params: ResolvedSampling, row: NDArray[np.float32], draws: int, seed: int = 7) -> list[int]:
    one = sampler(params, len(row), seed)
    return [one.sample(row).token for _ in range(draws)]


def softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def assert_distributed(tokens: list[int], probabilities: NDArray[np.float64]) -> None:
    """Chi-squared with a bar that a right sampler fails about once in a million seeds."""
    counts = Counter(tokens)
    assert set(counts) <= set(np.flatnonzero(probabilities).tolist())
    expected = probabilities * len(tokens)
    likely = expected > 5
    chi2 = sum((counts[int(i)] - expected[i]) ** 2 / expected[i] for i in np.flatnonzero(likely))
    freedom = int(likely.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 10


# ---- greedy


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_a_tie() -> None:
    row = np.array([0.0, 3.0, 1.0, 3.0], dtype=np.float32)
    assert tokens_of(ResolvedSampling(temperature=0), row, 3) == [1, 1, 1]


def test_sampling_leaves_the_logits_as_they_are() -> None:
    row = rows(1)[0]
    before = row.copy()
    params = ResolvedSampling(
        temperature=0.7, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=1.0,
        frequency_penalty=0.5, logit_bias={1: 5.0, 2: -100.0}, top_logprobs=3,
    )  # fmt: skip
    one = sampler(params, eos=(3,), min_tokens=2)
    for _ in range(4):
        one.sample(row)
    assert np.array_equal(row, before)


# ---- distributions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_distributed_as_the_softmax_at_that_temperature(temperature: float) -> None:
    row = rows(2)[0]
    tokens = tokens_of(ResolvedSampling(temperature=temperature), row, 20_000)
    assert_distributed(tokens, softmax(row / np.float32(temperature)))


def test_a_large_vocabulary_is_drawn_from_as_a_small_one() -> None:
    row = np.full(5_000, -np.inf, dtype=np.float32)  # large enough to be drawn from in chunks
    ids = [0, 1023, 1024, 3000, 4999]
    row[ids] = logits_of([0.1, 0.2, 0.3, 0.15, 0.25])
    assert_distributed(tokens_of(ResolvedSampling(), row, 20_000), softmax(row))


def test_a_banned_tail_is_never_drawn_even_by_the_largest_random_number() -> None:
    row = logits_of([0.5, 0.5, 0.0, 0.0])
    assert set(tokens_of(ResolvedSampling(), row, 5_000)) == {0, 1}


def test_temperature_close_to_zero_is_greedy_and_does_not_overflow() -> None:
    row = np.array([-3e4, 2e4, 1.9e4, -np.inf], dtype=np.float32)
    assert set(tokens_of(ResolvedSampling(temperature=1e-30), row, 10)) == {1}


# ---- filters: their exact supports


SUPPORT = logits_of([0.05, 0.4, 0.05, 0.2, 0.3])


def test_top_k_keeps_exactly_the_k_best_and_breaks_ties_by_id() -> None:
    for k, kept in ((1, {1}), (2, {1, 4}), (3, {1, 3, 4}), (4, {0, 1, 3, 4}), (9, {0, 1, 2, 3, 4})):
        assert set(tokens_of(ResolvedSampling(top_k=k), SUPPORT, 3_000)) == kept


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    cases = ((0.0, {1}), (0.39, {1}), (0.41, {1, 4}), (0.69, {1, 4}), (0.71, {1, 3, 4}), (0.93, {0, 1, 3, 4}))
    for top_p, kept in cases:
        assert set(tokens_of(ResolvedSampling(top_p=top_p), SUPPORT, 3_000)) == kept


def test_min_p_keeps_tokens_with_that_share_of_the_best_probability() -> None:
    for min_p, kept in ((0.1, {0, 1, 2, 3, 4}), (0.2, {1, 3, 4}), (0.6, {1, 4}), (1.0, {1})):
        assert set(tokens_of(ResolvedSampling(min_p=min_p), SUPPORT, 3_000)) == kept


def test_top_p_applies_after_top_k() -> None:
    # Of the three best, 0.4 + 0.3 are 78 %: enough for 0.75, though only 70 % of everything.
    assert set(tokens_of(ResolvedSampling(top_k=3, top_p=0.75), SUPPORT, 3_000)) == {1, 4}
    assert set(tokens_of(ResolvedSampling(top_p=0.75), SUPPORT, 3_000)) == {1, 3, 4}


def test_temperature_comes_before_the_filters() -> None:
    assert set(tokens_of(ResolvedSampling(temperature=0.2, top_p=0.75), SUPPORT, 3_000)) == {1}


def test_tokens_that_pass_the_filters_stay_in_proportion() -> None:
    params = ResolvedSampling(temperature=0.8, top_k=8, top_p=0.95, min_p=0.02)
    row = rows(5, 40)[0]
    p = softmax(row / np.float32(0.8))
    order = np.argsort(-p, kind="stable")[:8]
    p_top = p[order] / p[order].sum()
    kept = order[: int(np.searchsorted(np.cumsum(p_top), 0.95)) + 1]
    kept = kept[p[kept] >= 0.02 * p.max()]
    expected = np.zeros(40)
    expected[kept] = p[kept] / p[kept].sum()
    assert_distributed(tokens_of(params, row, 20_000), expected)


@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 3_000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 10.0]),
    top_p=st.floats(0.0, 0.9999),
)
def test_the_nucleus_equals_the_one_that_sorting_everything_finds(
    seed: int, vocab: int, scale: float, top_p: float
) -> None:
    # Rounded to few distinct values, so that ties are common.
    row = np.round(np.random.default_rng(seed).normal(0, scale or 1, vocab) * (scale > 0), 1)
    weights = np.exp(row - row.max()).astype(np.float32)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order], dtype=np.float64)
    wanted = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    kept = _nucleus(weights, top_p)
    if abs(len(kept) - wanted) <= 1 and abs(mass[wanted - 1] / mass[-1] - top_p) < 1e-6:
        wanted = len(kept)  # the border itself, decided by the order of a float sum
    assert kept.tolist() == sorted(order[:wanted].tolist())


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 4_000),
    count=st.integers(0, 4_100),
    levels=st.integers(1, 50),
)
def test_the_best_ids_equal_those_of_a_stable_sort(seed: int, size: int, count: int, levels: int) -> None:
    row = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    row[row == 0] = -np.inf
    assert best_ids(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()


# ---- seeds


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    row = np.zeros(1_000, dtype=np.float32)
    assert tokens_of(ResolvedSampling(), row, 30, seed=3) == tokens_of(ResolvedSampling(), row, 30, seed=3)
    assert tokens_of(ResolvedSampling(), row, 30, seed=3) != tokens_of(ResolvedSampling(), row, 30, seed=4)


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, 2**64 + 5, -(2**70)])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= tokens_of(ResolvedSampling(), rows(1)[0], 1, seed=seed)[0] < VOCAB


@pytest.mark.parametrize("done", range(10))
def test_a_sampler_rebuilt_from_its_tokens_goes_on_with_the_same_stream(done: int) -> None:
    params = ResolvedSampling(presence_penalty=0.7, frequency_penalty=0.2, repetition_penalty=1.2, top_p=0.97)
    steps = rows(9, count=20)
    whole = sampler(params, seed=5, eos=(2,), min_tokens=6)
    expected = [whole.sample(row).token for row in steps]
    rest = sampler(params, seed=5, eos=(2,), min_tokens=6, generated=expected[:done])
    assert [rest.sample(row).token for row in steps[done:]] == expected[done:]


# ---- penalties, bias, minimum length


def greedy_after(generated: list[int], row: list[float], **params: float) -> int:
    one = sampler(ResolvedSampling(temperature=0, **params), len(row), generated=generated)  # type: ignore[arg-type]
    return one.sample(np.array(row, dtype=np.float32)).token


def test_presence_is_subtracted_once_and_frequency_per_occurrence() -> None:
    row = [5.0, 4.0, 0.0]
    assert greedy_after([0, 0, 0], row, presence_penalty=0.9) == 0
    assert greedy_after([0], row, presence_penalty=1.1) == 1
    assert greedy_after([0, 0], row, frequency_penalty=0.4) == 0
    assert greedy_after([0, 0, 0], row, frequency_penalty=0.4) == 1
    assert greedy_after([1, 1], [4.9, 5.0, 0.0], frequency_penalty=-1.0) == 1


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    assert greedy_after([], [2.0, 1.1, 0.0], repetition_penalty=2.0) == 1  # token 0 is in the prompt
    assert greedy_after([0, 1], [-1.0, -1.0, -1.5], repetition_penalty=2.0) == 2
    # Once, however often a token occurs.
    assert greedy_after([0, 0, 0], [2.0, 0.9, 0.0], repetition_penalty=2.0) == 0


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    assert greedy_after([], [2.0, 1.9], presence_penalty=2.0, frequency_penalty=2.0) == 0


def test_penalties_count_the_tokens_as_they_are_sampled() -> None:
    one = sampler(ResolvedSampling(temperature=0, presence_penalty=10.0), 200)
    row = np.arange(200, 0, -1).astype(np.float32) / 100
    assert [one.sample(row).token for _ in range(150)] == list(range(150))


def test_a_bias_is_added_and_100_selects_and_minus_100_bans() -> None:
    row = np.array([300.0, 0.0, -300.0, 1.0], dtype=np.float32)

    def chosen(bias: dict[int, float]) -> int:
        return sampler(ResolvedSampling(temperature=0, logit_bias=bias), 4).sample(row).token

    assert chosen({1: 50.0}) == 0
    assert chosen({0: -100.0}) == 3
    assert chosen({2: 100.0}) == 2  # with the lowest logit
    assert chosen({2: 100.0, 1: 100.0}) == 1
    assert chosen({77: 100.0}) == 0  # not in the vocabulary
    assert chosen({2: float(np.nextafter(100.0, 0.0))}) == 0  # which float32 would round to 100


def test_end_of_sequence_is_not_sampled_before_the_minimum() -> None:
    row = np.array([9.0, 8.0, 7.0], dtype=np.float32)
    one = sampler(ResolvedSampling(temperature=0), 3, eos=(0, 1, 99), min_tokens=2)
    assert [one.sample(row).token for _ in range(3)] == [2, 2, 0]


# ---- faulty logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(temperature: float, broken: float) -> None:
    row = rows(1)[0]
    row[5] = broken
    with pytest.raises(SamplingFailed, match="for token 5"):
        sampler(ResolvedSampling(temperature=temperature)).sample(row)
    assert issubclass(SamplingFailed, EngineError)


def test_a_row_without_any_possible_token_is_an_error() -> None:
    with pytest.raises(SamplingFailed):
        sampler(ResolvedSampling()).sample(np.full(VOCAB, -np.inf, dtype=np.float32))
    banned = dict.fromkeys(range(VOCAB), -100.0)
    with pytest.raises(SamplingFailed, match="logit_bias"):
        sampler(ResolvedSampling(logit_bias=banned)).sample(rows(1)[0])


# ---- log-probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = rows(3)[0]
    params = ResolvedSampling(temperature=0.3, top_k=1, logit_bias={4: 100.0}, top_logprobs=4)
    sampled = sampler(params).sample(row)
    log_p = np.log(softmax(row))
    assert sampled.token == 4
    assert sampled.logprob.logprob == pytest.approx(log_p[4], abs=1e-5)
    best = np.argsort(-row)[:4]
    assert [id for id, _ in sampled.logprob.top] == best.tolist()
    assert [value for _, value in sampled.logprob.top] == pytest.approx(log_p[best].tolist(), abs=1e-5)


def test_logprobs_are_only_made_when_asked_for() -> None:
    row = rows(3)[0]
    assert sampler(ResolvedSampling()).sample(row).logprob is None
    alone = sampler(ResolvedSampling(top_logprobs=0)).sample(row).logprob
    assert alone.top == ()


def test_a_prompt_is_scored_row_by_row() -> None:
    logits = rows(4, count=3)
    scored = score_prompt(logits, np.array([2, 0, 11], dtype=np.int32), top=2)
    for entry, row, token in zip(scored, logits, (2, 0, 11), strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(np.log(softmax(row))[token]), abs=1e-5)
        assert entry.top[0][0] == int(row.argmax())
        assert len(entry.top) == 2


@pytest.mark.parametrize("vocab", [1, 12, 63, 64, 65, 262, 512, 5119, 32_000])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("decimals", [8, 0])
def test_scores_of_many_rows_are_those_of_each_row_bit_for_bit(vocab: int, top: int, decimals: int) -> None:
    """Rounded logits have ties, which go to the lowest id."""
    logits = np.round(rows(5, vocab, count=37), decimals)
    logits[3] = 0.0
    following = np.random.default_rng(6).integers(0, vocab, 37).astype(np.int32)
    scored = score_prompt(logits, following, top)
    alone = [_logprob(row, int(token), top) for row, token in zip(logits, following, strict=True)]
    assert list(scored) == alone


def test_no_rows_have_no_scores_and_rows_that_are_not_finite_are_refused() -> None:
    assert list(score_prompt(rows(1, 100, count=0), np.empty(0, np.int32), top=3)) == []
    logits = rows(1, 5000, count=3)
    logits[1, 17] = np.nan
    with pytest.raises(SamplingFailed, match="finite"):
        score_prompt(logits, np.zeros(3, np.int32), top=3)
