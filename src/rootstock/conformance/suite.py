"""The suite: runs the cases one after the other, and compares each answer with its reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rootstock.conformance.cases import CASES, Case
from rootstock.conformance.server import Answer, AskFailed, Json, Server
from rootstock.conformance.talk import Exchange, Refused, Talk, Violation
from rootstock.conformance.truth import Truth, compared, key_of, tolerance_of
from rootstock.errors import InvalidOption, StartupError


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Size of the suite."""

    cases: tuple[str, ...] = ()  # all
    seed: int = 0
    prompt_words: int = 300
    answer_tokens: int = 12
    pressure: int = 12  # conversations that come between
    tolerance: float | None = None  # nats; None: ten times what the server's rounding shows

    def __post_init__(self) -> None:
        for name in self.cases:
            if name not in CASES:
                raise InvalidOption("--cases", name, f"some of {', '.join(CASES)}")


@dataclass(slots=True)
class CaseResult:
    case: Case
    sent: Sequence[Exchange] = ()
    findings: list[Violation] = field(default_factory=list)
    refused: str = ""
    answers: int = 0
    compared: int = 0  # answers that had a reference
    largest_nats: float = 0.0
    shared_tokens: int = 0  # that were sent before, of prompts
    cached_tokens: int = 0  # that the server says it found, of these prompts


@dataclass(slots=True)
class SuiteResult:
    server: Server
    noise: float = 0.0
    tolerance: float = 0.0
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def findings(self) -> list[Violation]:
        return [finding for result in self.cases for finding in result.findings]

    @property
    def compared(self) -> int:
        return sum(result.compared for result in self.cases)


def run_suite(
    server: Server,
    options: SuiteOptions,
    restart: Callable[[], None] | None = None,
    on_case: Callable[[CaseResult], None] = lambda result: None,
) -> SuiteResult:
    """Asks a server the requests of the cases. Calls `on_case` after each. Raises StartupError."""
    result = SuiteResult(server)
    truth = Truth(server, options.seed)

    def talk_of(name: str) -> Talk:
        return Talk(
            name,
            server,
            truth,
            random.Random(f"{options.seed} {name}"),
            size=options.prompt_words,
            answer_tokens=options.answer_tokens,
            pressure=options.pressure,
            restart=restart,
        )

    try:
        first = talk_of("probe")
        body = first.chat(0.5).body
        server.probe(body)
        truth.find_way(body, first.chat(0.5).body)
        result.noise = truth.noise([first.chat(part).body for part in (0.2, 0.6, 1.0, 2.0)])
    except AskFailed as error:
        raise StartupError(f"The server does not answer plain chats: {error.reason}") from error
    result.tolerance = tolerance_of(result.noise) if options.tolerance is None else options.tolerance
    waiting: list[tuple[CaseResult, Talk]] = []
    for name in options.cases or CASES:
        talk = talk_of(name)
        waiting.append((_run_case(CASES[name], talk), talk))
        if server.can.cold_by != "flood":
            _judge(*waiting.pop(), truth, result, on_case)
    truth.ask_in_rounds([_bodies(talk) for _, talk in waiting])
    for each, talk in waiting:
        _judge(each, talk, truth, result, on_case)
    return result


def _bodies(talk: Talk) -> list[Json]:
    """Returns the different prompts of a case."""
    return list({key_of(sent.body): sent.body for sent in talk.sent if sent.answer is not None}.values())


def _run_case(case: Case, talk: Talk) -> CaseResult:
    result = CaseResult(case)
    try:
        case.run(talk)
    except Refused as error:
        result.refused = str(error)
    return result


def _judge(
    result: CaseResult,
    talk: Talk,
    truth: Truth,
    whole: SuiteResult,
    on_case: Callable[[CaseResult], None],
) -> None:
    """Compares the answers of a case with their references."""
    case, tolerance = result.case, whole.tolerance
    result.sent, result.findings = talk.sent, talk.findings
    for sent in talk.sent:
        answer = sent.answer
        if answer is None:
            continue
        result.answers += 1
        if sent.shared is not None and answer.cached_tokens is not None:
            result.shared_tokens += sent.shared
            result.cached_tokens += answer.cached_tokens
        cold = truth.of(sent.body) or truth.first(sent.body, answer)
        if cold is None:
            continue
        has_length = _of_one_length(cold, answer)
        drawn = bool(sent.body.get("temperature"))
        difference, nats = compared(cold, answer, tolerance, in_one_form=not sent.streamed, drawn=drawn)
        if (not has_length or difference is not None) and sent.ids is not None:
            # The history may have the tokens that were sampled, in place of others of the same text.
            by_ids = truth.of_ids(sent.body, sent.ids)
            if by_ids is not None:
                has_length = _of_one_length(by_ids, answer)
                difference, nats = compared(by_ids, answer, tolerance, in_one_form=False, drawn=drawn)
        if not has_length:
            told = f"{answer.prompt_tokens} prompt tokens, {cold.prompt_tokens} where nothing is cached"
            result.findings.append(Violation(case.name, "false count", f"{sent.how}: {told}", sent.number))
            continue
        result.compared += 1
        result.largest_nats = max(result.largest_nats, nats)
        if difference is not None:
            what = f"{sent.how}: at token {difference.position} {difference.what}"
            result.findings.append(Violation(case.name, "wrong answer", what, sent.number, difference.nats))
    whole.cases.append(result)
    on_case(result)


def _of_one_length(cold: Answer, answer: Answer) -> bool:
    """Returns whether both say that the prompt has the same length, where both say it."""
    return None in (cold.prompt_tokens, answer.prompt_tokens) or cold.prompt_tokens == answer.prompt_tokens
