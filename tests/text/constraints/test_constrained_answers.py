"""Constrained answers through the engine: always valid, whatever else the engine does meanwhile."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.helpers import GREEDY, Bench, Client
from rootstock.cache import KVCache
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Finished,
    StopParams,
    TokenEvent,
    requests_for,
)
from rootstock.engine.speculation.proposer import NgramProposer
from rootstock.errors import ConstraintFailed
from rootstock.text.constraints.asked import (
    ANY_JSON_OBJECT,
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Lark,
    ReasoningBounds,
    Regex,
)
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.constraints.frames import Link
from text.constraints.helpers import BYTES, VOCAB

POINT = JsonSchema(
    json.dumps(
        {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 999},
                "kind": {"enum": ["a", "bb"]},
            },
            "required": ["x", "kind"],
            "additionalProperties": False,
        }
    )
)
END, TOOL, SYSTEM = (256 + BYTES.SPECIAL.index(name) for name in ("<|end|>", "<|tool|>", "<|system|>"))


def sampled(seed: int, **sampling: object) -> ResolvedSampling:
    return ResolvedSampling(seed=seed, **sampling)  # type: ignore[arg-type]


def bench(blocks: int = 2_000, **options: object) -> Bench:
    return Bench(blocks, vocab_size=VOCAB, tokenizer=BYTES, **options)  # type: ignore[arg-type]


def compiled(
    on: Bench, grammar: Grammar | None, reasoning: ReasoningBounds | None = None
) -> CompiledConstraint:
    assert on.engine.constraints is not None
    return on.engine.constraints.compile(Constraint(grammar, reasoning))


def prompt(number: int) -> list[int]:
    return BYTES.encode(f"prompt {number}: ").tolist()


def ask(
    on: Bench, constraint: CompiledConstraint | None, seed: int, most: int = 600, **request: object
) -> Client:
    request.setdefault("sampling", sampled(seed))
    return on.ask(prompt(seed), most, constraint=constraint, **request)


def is_point(client: Client) -> bool:
    value = json.loads(client.text)
    return set(value) == {"x", "kind"} and 0 <= value["x"] <= 999 and value["kind"] in ("a", "bb")


def test_answers_follow_each_kind_of_grammar_and_end_by_themselves() -> None:
    on = bench()
    matched = {
        Regex("(ab?c){2,5}"): lambda text: re.fullmatch("(ab?c){2,5}", text),
        Choice(("yes", 'n"o\n', "\U0001f600é", "yes and no")): lambda text: (
            text in ("yes", 'n"o\n', "\U0001f600é", "yes and no")
        ),
        Lark('start: "[" NUM ("," NUM)* "]"\nNUM: /[0-9]{1,3}/'): lambda text: isinstance(
            json.loads(text), list
        ),
        Lark('start: "<call>" args "</call>"\nargs: %json {"type":"integer"}'): lambda text: re.fullmatch(
            r"<call>-?\d+</call>", text
        ),
        Lark("start: <|tool|> /x{1,3}/"): lambda text: re.fullmatch("x{1,3}", text),
    }
    for grammar, check in matched.items():
        constraint = compiled(on, grammar)
        clients = [ask(on, constraint, seed) for seed in range(6)]
        on.run()
        for client in clients:
            assert client.finished.reason == "stop"
            assert check(client.text), (grammar, client.text)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}])
def test_answers_follow_a_schema_under_every_filter(sampling: dict[str, float]) -> None:
    on = bench()
    constraint = compiled(on, POINT)
    clients = [ask(on, constraint, seed, sampling=sampled(seed, **sampling)) for seed in range(5)]
    on.run()
    assert all(is_point(client) for client in clients if client.finished.reason == "stop")
    assert any(client.finished.reason == "stop" for client in clients)


def test_an_answer_is_the_same_alone_in_a_batch_after_preemption_and_from_the_cache() -> None:
    def answers(blocks: int, seeds: list[int], **options: object) -> dict[int, list[int]]:
        on = bench(blocks, **options)
        constraint = compiled(on, POINT)
        clients = {seed: ask(on, constraint if seed % 2 == 0 else None, seed, 120) for seed in seeds}
        on.run()
        again = {seed: ask(on, constraint if seed % 2 == 0 else None, seed, 120) for seed in seeds}
        on.run()
        for seed in seeds:
            assert again[seed].tokens == clients[seed].tokens, "from the cache"
        return {seed: client.tokens for seed, client in clients.items()}

    together = answers(2_000, [0, 1, 2, 3, 4])
    for seed in range(5):
        assert answers(2_000, [seed])[seed] == together[seed]
    assert answers(40, [0, 1, 2, 3, 4]) == together, "with preemptions"
    assert answers(2_000, [0, 1, 2, 3, 4], chunk_tokens=6) == together, "in chunks"


def test_preemption_happens_in_the_small_cache() -> None:
    on = bench(40)
    constraint = compiled(on, POINT)
    for seed in range(5):
        ask(on, constraint if seed % 2 == 0 else None, seed, 120)
    preempted = False
    while on.engine.step():
        preempted |= any(type(each.state).__name__ == "Preempted" for each in on.engine.scheduler.sequences())
    assert preempted


def test_drafts_change_no_constrained_answer_and_are_cut_where_the_grammar_forbids_them() -> None:
    class Eager(NgramProposer):
        """Proposes the right token, then one that the grammar forbids."""

        def __init__(self, cache: KVCache) -> None:
            super().__init__(cache)
            self.lengths: list[int] = []

        def drafts(self, sequences, leases, room):  # type: ignore[no-untyped-def]
            found = []
            for sequence in sequences:
                progress = sequence.sampler.progress
                draft = np.array([ord("1"), ord("1"), ord("z")], np.int32)
                if progress is not None:
                    draft = draft[: progress.agreeing(draft.tolist())]
                    self.lengths.append(len(draft))
                found.append(draft[: sequence.tokens_left - 1])
            return found

    def answers(drafts: bool) -> list[list[int]]:
        on = bench()
        if drafts:
            on = bench(proposer=Eager(on.cache))
        constraint = compiled(on, Regex("[01]{30,40}"))
        clients = [ask(on, constraint, seed, 60) for seed in range(3)]
        on.run()
        if drafts:
            assert isinstance(on.engine.parts.proposer, Eager)
            assert set(on.engine.parts.proposer.lengths) <= {0, 1, 2}, "no letter is a draft"
            assert sum(client.finished.usage.accepted_draft_tokens for client in clients) > 0
        return [client.tokens for client in clients]

    assert answers(drafts=True) == answers(drafts=False)


def test_a_batch_mate_is_not_changed_by_a_mask() -> None:
    on = bench()
    free = [on.ask(prompt(i), 12) for i in range(3)]
    held = [ask(on, compiled(on, POINT), 7 + i) for i in range(3)]
    on.run()
    on.expect(*free)
    assert all(is_point(client) for client in held)


def test_a_grammar_gets_one_message_for_all_answers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    on = bench()
    one, other = compiled(on, POINT), compiled(on, Regex("[ab]{200}"))
    sent: list[str] = []
    send = Link.send

    def counted(link: Link, head: dict[str, Any], body: bytes = b"") -> None:
        sent.append(head.get("do", "ids"))
        send(link, head, body)

    gc.collect()  # vocabularies of earlier tests: for each, the process gets a message when it is collected
    monkeypatch.setattr(Link, "send", counted)
    for seed in range(8):
        ask(on, one if seed % 2 else other, seed, 20)
    before = on.engine.stats().counters.steps
    on.run()
    steps = on.engine.stats().counters.steps - before
    assert set(sent) <= {"round", "ids"}, "the grammar also asks how a text is tokenized"
    assert 0 < sent.count("round") <= 2 * (steps + 1), (
        "one for each grammar and step, and one for each first mask"
    )


def test_choices_share_a_compiled_grammar_and_differ() -> None:
    on = bench()
    requests = requests_for(
        "r",
        [BYTES.encode("x")],
        6,
        sampled(3),
        StopParams(max_tokens=300),
        salt="",
        constraint=compiled(on, POINT),
    )
    ends: list[list[object]] = [[] for _ in requests]
    for request, events in zip(requests, ends, strict=True):
        on.engine.submit(request, events.append)
    on.run()
    texts = ["".join(getattr(event, "text", "") for event in events) for events in ends]
    assert all(set(json.loads(text)) == {"x", "kind"} for text in texts)
    assert len(set(texts)) > 1


def test_choices_with_reasoning_are_those_of_runs_alone_also_with_preemptions_and_drafts() -> None:
    thinks = ReasoningBounds("</think>", starts_inside=True, budget_tokens=6)

    def answers(
        choices: Sequence[int], blocks: int = 2_000, draft_tokens: int = 0
    ) -> tuple[list[list[int]], bool]:
        on = bench(blocks, draft_tokens=draft_tokens)
        constraint = compiled(on, Regex("[01]{60,90}"), thinks)
        stop = StopParams(max_tokens=150)
        made = requests_for(
            "r", [BYTES.encode("prompt: ")], 6, sampled(3), stop, salt="", constraint=constraint
        )
        events: list[list[Any]] = [[] for _ in choices]
        for choice, got in zip(choices, events, strict=True):
            on.engine.submit(made[choice], got.append)
        preempted = False
        while on.engine.step():
            states = [type(each.state).__name__ for each in on.engine.scheduler.sequences()]
            preempted |= "Preempted" in states
        if draft_tokens:
            assert sum(got[-1].usage.accepted_draft_tokens for got in events) > 0
        return [[event.token for event in got if isinstance(event, TokenEvent)] for got in events], preempted

    together, _ = answers(range(6))
    for tokens in together:
        text = visible(tokens)
        assert re.fullmatch(b"[01]{60,90}", text[text.find(b"</think>") + len(b"</think>") :].rstrip(b"?"))
    assert [answers([choice])[0][0] for choice in range(6)] == together
    assert answers(range(6), blocks=60) == (together, True)
    assert answers(range(6), draft_tokens=8)[0] == together
    assert answers(range(6), blocks=60, draft_tokens=8) == (together, True)


def test_a_cancelled_answer_leaves_its_batch_mates_alone() -> None:
    on = bench()
    constraint = compiled(on, ANY_JSON_OBJECT)
    gone, stays = ask(on, constraint, 1), ask(on, compiled(on, POINT), 2)
    on.run(4)
    on.engine.abort(gone.request.id)
    on.run()
    assert gone.is_aborted
    assert is_point(stays)


# ---- the end of an answer


def test_the_end_comes_only_where_the_grammar_accepts() -> None:
    on = bench()
    always_end = sampled(1, logit_bias={END: 90.0})
    client = ask(on, compiled(on, Regex("(ab){2,}")), 1, sampling=always_end)
    on.run()
    assert client.text == "abab"
    assert client.finished.stopped_by == END


def test_min_tokens_holds_the_end_back_until_only_the_end_is_left() -> None:
    on = bench()
    always_end = sampled(1, logit_bias={END: 90.0})
    stop = StopParams(max_tokens=50, min_tokens=10)
    longer = ask(on, compiled(on, Regex("a{2,}")), 1, sampling=always_end, stop=stop)
    complete = ask(on, compiled(on, Regex("a{3}")), 1, sampling=always_end, stop=stop)
    on.run()
    assert longer.text == "a" * 10
    assert complete.text == "aaa"
    assert complete.finished.reason == "stop"


def test_a_complete_answer_ends_also_without_end_tokens() -> None:
    on = bench()
    client = ask(on, compiled(on, Regex("a{1,20}")), 1, stop=StopParams(max_tokens=50, ignore_eos=True))
    on.run()
    assert client.text == "a" * 20
    assert client.finished.reason == "stop"
    assert client.finished.stopped_by is None


def test_stop_strings_stop_tokens_and_max_tokens_end_an_answer_inside_its_grammar() -> None:
    on = bench()
    constraint = compiled(on, Regex("ab{5}c{5}d"))
    by_text = ask(on, constraint, 1, stop=StopParams(max_tokens=50, stop_strings=("bc",)))
    by_token = ask(on, constraint, 1, stop=StopParams(max_tokens=50, stop_tokens=(ord("c"),)))
    by_length = ask(on, constraint, 1, stop=StopParams(max_tokens=4))
    on.run()
    assert by_text.text == "abbbb"
    assert by_token.text == "abbbbb"
    assert by_token.finished.stopped_by == ord("c")
    assert by_length.text == "abbb"
    assert by_length.finished.reason == "length"


@pytest.mark.parametrize("bias", [{ord("b"): -100.0}, {ord("z"): 100.0}, {ord("b"): -100.0, END: -100.0}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_bans_all_that_the_grammar_allows_does_not_count(
    bias: dict[int, float], temperature: float
) -> None:
    on = bench()
    sampling = replace(sampled(1, logit_bias=bias), temperature=temperature)
    banned = ask(on, compiled(on, Regex("ab[bc]")), 1, sampling=sampling)
    other = on.ask(prompt(2), 6)
    on.run()
    assert banned.text in ("abb", "abc")
    assert banned.text == "abc" or ord("z") in bias  # elsewhere the bias counts
    assert banned.finished.reason == "stop"
    on.expect(other)


def test_a_grammar_that_reaches_a_limit_fails_its_request_alone() -> None:
    on = bench()
    wide = compiled(on, Lark('start: a{200000}\na: "x"'))
    hostile, other = ask(on, wide, 1), on.ask(prompt(2), 6)
    held = ask(on, compiled(on, POINT), 3)
    on.run()
    assert isinstance(hostile.error, ConstraintFailed)
    on.expect(other)
    assert is_point(held)


# ---- reasoning


def visible(tokens: list[int]) -> bytes:
    return b"".join(bytes([token]) if token < 256 else b"?" for token in tokens)


def reasoned(client: Client, marker: str) -> tuple[str, str]:
    reasoning, found, answer = client.text.partition(marker)
    assert found, client.text
    return reasoning, answer


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_grammar_begins_after_reasoning_which_ends_with_its_budget(budget: int) -> None:
    on = bench()
    thinks = ReasoningBounds("</think>", starts_inside=True, budget_tokens=budget)
    clients = [
        ask(on, compiled(on, POINT, thinks), seed, sampling=sampled(seed, top_logprobs=1))
        for seed in range(4)
    ]
    on.run()
    for client in clients:
        tokens = visible(client.tokens)
        assert tokens.find(b"</think>") == budget
        assert set(json.loads(tokens[budget + len(b"</think>") :])) == {"x", "kind"}
        assert all(event.logprob is not None for event in client.events if hasattr(event, "logprob"))


def test_reasoning_that_ends_by_itself_is_followed_by_the_grammar() -> None:
    on = bench()
    thinks = ReasoningBounds("<|tool|>", starts_inside=True, budget_tokens=40)
    likely = [
        ask(on, compiled(on, Regex("[xyz]{3}"), thinks), s, sampling=sampled(s, logit_bias={TOOL: 6.0}))
        for s in range(6)
    ]
    on.run()
    lengths = set()
    for client in likely:
        end = client.tokens.index(TOOL)
        lengths.add(end)
        assert re.fullmatch(b"[xyz]{3}", visible(client.tokens[end + 1 : end + 4]))
        assert END not in client.tokens[:end], "no end before the answer"
    assert len(lengths) > 1


def test_no_token_holds_the_end_of_a_marker_and_text_after_it() -> None:
    on = bench()
    thinks = ReasoningBounds(">>", starts_inside=True)
    client = ask(on, compiled(on, Regex("a"), thinks), 1, sampling=sampled(1, logit_bias={ord(">"): 7.0}))
    on.run()
    reasoning, answer = reasoned(client, ">>")
    assert answer == "a"
    assert ">>" not in reasoning


def test_the_name_of_a_control_token_and_text_after_it_are_no_marker() -> None:
    on = bench()
    thinks = compiled(on, Regex("a"), ReasoningBounds(">>", starts_inside=True, budget_tokens=30))
    bias = {TOOL: 8.0, ord(">"): 5.0}
    clients = [ask(on, thinks, seed, sampling=sampled(seed, logit_bias=bias)) for seed in range(8)]
    on.run()
    reasonings = [reasoned(client, ">>") for client in clients]
    assert all(visible(client.tokens).endswith(b">>a") for client in clients), reasonings
    assert all(b">>" not in visible(client.tokens)[:-3] for client in clients)
    assert any(b"?>" in visible(client.tokens) for client in clients)


def test_an_answer_may_begin_with_the_marker_of_reasoning_or_with_the_grammar() -> None:
    on = bench()
    may = ReasoningBounds("<|tool|>", start="<|system|>", budget_tokens=2)
    thinking = ask(on, compiled(on, Regex("ab"), may), 1, sampling=sampled(1, logit_bias={SYSTEM: 90.0}))
    answering = ask(on, compiled(on, Regex("ab"), may), 1, sampling=sampled(1, logit_bias={SYSTEM: -100.0}))
    on.run()
    assert thinking.tokens[0] == SYSTEM
    assert thinking.tokens[3] == TOOL
    assert visible(thinking.tokens[4:6]) == b"ab"
    assert answering.text == "ab"


def test_a_budget_alone_counts_all_reasoning_of_a_free_answer() -> None:
    on = bench()
    budget = ReasoningBounds("<|tool|>", start="<|system|>", starts_inside=True, budget_tokens=5)
    client = ask(
        on,
        compiled(on, None, budget),
        2,
        60,
        sampling=sampled(2, logit_bias={SYSTEM: 5.0, TOOL: 5.0, END: -100.0}),
    )
    on.run()
    counted, inside = 0, True
    for token in client.tokens:
        if inside and token != TOOL:
            counted += 1
        inside = (token != TOOL) if inside else token == SYSTEM
    assert counted <= 5
    assert isinstance(client.events[-1], Finished)


def test_a_sampler_that_goes_on_after_generated_tokens_gives_the_same_answer() -> None:
    from rootstock.engine.sampling import Sampler
    from rootstock.text.constraints.progress import AnswerProgress

    on = bench()
    constraint = compiled(on, POINT, ReasoningBounds("</t>", starts_inside=True, budget_tokens=3))
    rows = np.random.default_rng(0).normal(size=(60, VOCAB)).astype(np.float32)

    def sampler(generated: list[int]) -> Sampler:
        ends = (END,)
        progress = AnswerProgress(constraint)
        return Sampler(sampled(5), BYTES.encode("p"), VOCAB, 5, ends, generated=generated, progress=progress)

    whole, tokens = sampler([]), list[int]()
    for row in rows:
        tokens.append(whole.sample(row).token)
        assert whole.progress is not None
        if whole.progress.is_complete or tokens[-1] == END:
            break
    for cut in range(1, len(tokens)):
        rest = sampler(tokens[:cut])
        assert [rest.sample(row).token for row in rows[cut : len(tokens)]] == tokens[cut:]


def test_greedy_answers_are_those_of_the_sampler_alone() -> None:
    on = bench()
    client = ask(on, compiled(on, Regex("[a-f]{8}")), 4, sampling=GREEDY)
    on.run()
    so_far = prompt(4)
    for _ in range(8):
        logits = on.runtime.expected_logits(np.array(so_far, np.int32))
        so_far.append(ord("a") + int(logits[ord("a") : ord("f") + 1].argmax()))
    assert client.text == bytes(so_far[len(prompt(4)) :]).decode()
