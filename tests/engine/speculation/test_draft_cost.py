"""Costs and gains of drafts."""

from __future__ import annotations

import numpy as np
import pytest

from rootstock.engine.speculation.draft_cost import (
    AcceptanceRate,
    Calibration,
    DraftCost,
    Floats,
    could_pay,
    worth_verifying,
)


def chances(probability: float, length: int = 8) -> Floats:
    return probability ** np.arange(1, length + 1)


def learnt(cost_of_a_row: float, sequences: int = 1, drafts: int = 4) -> DraftCost:
    cost = DraftCost()
    for _ in range(20):
        cost.observe(sequences, 0, 500, 1.0)
        for fewer in (1, 2, drafts):
            cost.observe(sequences, fewer, 500, 1.0 + fewer * cost_of_a_row)
    return cost


def test_right_drafts_raise_the_expected_acceptance_and_wrong_ones_lower_it() -> None:
    right, wrong = AcceptanceRate(), AcceptanceRate()
    for _ in range(10):
        right.compared(4, 4)
        wrong.compared(4, 0)
    assert right.probability(0.5) > 0.95
    assert wrong.probability(0.5) < 0.15


def test_after_misses_in_a_row_drafts_pause_longer_and_longer() -> None:
    acceptance = AcceptanceRate()
    tries = 0
    for _ in range(300):
        if not acceptance.skip():
            tries += 1
            acceptance.compared(3, 0)
    assert 5 <= tries <= 12
    while acceptance.skip():
        pass
    acceptance.compared(3, 1)  # one that is right ends it
    acceptance.compared(3, 0)
    assert not acceptance.skip()


def test_a_draft_that_the_end_of_the_answer_cut_short_was_not_wrong() -> None:
    cut, wrong = AcceptanceRate(), AcceptanceRate()
    cut.compared(3, 3)
    wrong.compared(8, 3)
    assert cut.probability(0.5) > wrong.probability(0.5)


def test_a_calibration_learns_how_sure_a_source_is() -> None:
    calibration = Calibration(3)
    assert calibration.chance(1, 0.9) == pytest.approx(0.9)
    for number in range(400):
        calibration.learn(0, came=number % 10 == 0)
        calibration.learn(2, came=True)
    assert calibration.chance(0, 0.9) < 0.2
    assert calibration.chance(1, 0.9) == pytest.approx(0.9)
    assert calibration.chance(2, 0.1) > 0.95
    assert 0.5 < calibration.overall(0.9) < 0.6
    for _ in range(2000):
        calibration.learn(2, came=False)
    assert calibration.chance(2, 0.9) < 0.05, "it forgets"


def test_drafts_are_as_long_as_they_are_likely() -> None:
    free, dear = np.full(16, 0.05), 0.2 * np.arange(1, 17)
    assert worth_verifying(1, [chances(0.9)], free).counts == [8]
    likely, unlikely = (worth_verifying(1, [chances(p)], dear).counts[0] for p in (0.9, 0.4))
    assert 1 <= unlikely < likely < 8
    assert worth_verifying(1, [chances(0.01)], dear).counts == [0]


def test_of_several_drafts_the_likelier_tokens_are_verified() -> None:
    longer = 0.1 * np.arange(1, 17)
    first, second = worth_verifying(4, [chances(0.95), chances(0.5)], longer).counts
    assert first > second
    assert worth_verifying(4, [chances(0.95), chances(0.95)], np.zeros(5)).counts in (
        [3, 2],
        [2, 3],
    )  # room for five
    assert worth_verifying(2, [np.empty(0), chances(0.9)], longer).counts[0] == 0
    assert worth_verifying(2, [np.empty(0), np.empty(0)], longer).counts == [0, 0]


def test_the_cost_of_verifying_is_learnt_from_steps_without_drafts() -> None:
    longer = learnt(0.2).longer(1, 500, 4)
    assert abs(longer[-1] - 0.8) < 0.01
    cheap = learnt(0.001).longer(1, 500, 4)
    assert cheap[-1] < 0.01


def test_more_drafts_are_tried_step_by_step() -> None:
    cost, tried = DraftCost(), []
    for _ in range(30):
        cost.observe(4, 0, 500, 1.0)
        longer = cost.longer(4, 500, 64)
        assert longer is not None
        tried.append(len(longer))
        cost.observe(4, len(longer), 500, 1.0)
    assert tried[:4] == [1, 1, 2, 2]
    assert tried == sorted(tried)
    assert tried[-1] == 64


def test_without_a_similar_step_to_compare_with_there_are_no_drafts() -> None:
    cost = learnt(0.01)
    assert cost.longer(1, 500, 4) is not None
    assert cost.longer(2, 500, 4) is None  # another batch
    assert cost.longer(1, 5_000, 4) is None  # so much more to attend to
    for _ in range(100):
        cost.observe(1, 4, 500, 1.0)
    assert cost.longer(1, 500, 4) is None  # too long ago


def test_drafts_that_cost_too_much_are_left_out_and_tried_again_some_time() -> None:
    cost = learnt(1.0)
    tried = 0
    for _ in range(1000):
        cost.observe(1, 0, 500, 1.0)
        longer = cost.longer(1, 500, 4)
        assert longer is not None
        if drafts := worth_verifying(1, [chances(0.3, 4)], longer).counts[0]:
            tried += 1
            cost.observe(1, drafts, 500, 1.0 + drafts)
        else:
            cost.relax(1)
    assert 1 <= tried <= 20


def test_drafts_that_cannot_pay_even_if_right_are_recognized() -> None:
    assert could_pay(1, np.full(4, 0.5))
    assert not could_pay(32, np.arange(1, 5) / 8)


def test_a_step_that_hiccups_changes_little() -> None:
    cost = learnt(0.05)
    cost.observe(1, 4, 500, 50.0)
    longer = cost.longer(1, 500, 4)
    assert longer[-1] < 0.6


def test_of_a_state_long_drafts_are_verified_only_if_they_are_likely() -> None:
    """A wrong token costs the next step its draft."""
    longer = np.linspace(0.05, 0.4, 8)
    for probability, batch in ((0.6, 1), (0.9, 1), (0.6, 4), (0.9, 4)):
        given = [chances(probability)] * batch
        with_state = worth_verifying(batch, given, longer, repeats=True)
        without = worth_verifying(batch, given, longer)
        assert sum(with_state.counts) <= sum(without.counts)
        assert with_state.gain <= without.gain
    certain = [np.ones(4)]
    assert worth_verifying(1, certain, longer, repeats=True) == worth_verifying(1, certain, longer)


def test_heads_that_take_longer_than_they_give_are_not_worth_it() -> None:
    free = np.zeros(4)
    assert worth_verifying(1, [chances(0.8, 1)], free, beside=0.3).gain == pytest.approx(1.8 / 1.3)
    assert worth_verifying(1, [chances(0.8, 1)], free, beside=0.9).counts == [0]


def test_a_step_that_something_else_held_up_does_not_rule_drafts_out() -> None:
    cost = DraftCost()
    for _ in range(6):
        cost.observe(1, 0, 500, 1.0)
        cost.observe(1, 1, 500, 1.1)
    for held_up in (1.9, 2.5):
        cost.observe(1, 1, 500, held_up)
    longer = cost.longer(1, 500, 1)
    assert longer is not None
    assert longer[0] == pytest.approx(0.1)


def test_a_draft_whose_cost_has_grown_is_ruled_out_in_a_few_steps() -> None:
    cost = DraftCost()
    for _ in range(10):
        cost.observe(1, 0, 500, 1.0)
        cost.observe(1, 1, 500, 1.1)
    steps = 0
    while (longer := cost.longer(1, 500, 1)) is not None and longer[0] < 1.0:
        cost.observe(1, 1, 500, 2.5)
        steps += 1
    assert longer is not None
    assert steps == 4


def test_a_text_that_could_not_be_guessed_is_tried_again() -> None:
    rate = AcceptanceRate()
    for _ in range(6):
        rate.compared(1, 0)
    low = rate.probability(0.6)
    for _ in range(300):
        rate.skip()
    assert low < 0.3
    assert rate.probability(0.6) > 0.5
