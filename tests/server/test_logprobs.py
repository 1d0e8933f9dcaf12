"""Log-probabilities in bulk: a prompt is scored once for all of its choices, and the answer is encoded in pieces."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.config import EngineConfig
from rootstock.engine import step
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Finished,
    Logprobs,
    Request,
    RequestId,
    StopParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from rootstock.errors import TooManyLogprobs
from rootstock.runtime.base import Batch
from rootstock.server.app import create_app
from rootstock.server.formats.openai import completion_answers
from rootstock.server.wire.api_call import ApiCall, ChoiceHistory
from rootstock.server.wire.json_pieces import (
    CHUNK_CHARACTERS,
    KeptPieces,
    LazyList,
    in_chunks,
    items_text,
    json_pieces,
)
from rootstock.text.limits import MAX_LOGPROBS
from server.asgi import ask
from waiting import HANG_S

TEXT = "/v1/completions"
PROMPT = "a prompt that is scored once, whatever is asked beside it"
ECHO: dict[str, Any] = {"echo": True, "logprobs": 3, "temperature": 0, "ignore_eos": True, "max_tokens": 4}


class Scoring:
    """A fault for forwards that score a prompt: a test can await, hold and fail them."""

    def __init__(self) -> None:
        self.before_scoring = threading.Event()
        self.may_score = threading.Event()
        self.may_score.set()
        self.fails_scoring = False

    def __call__(self, batch: Batch) -> None:
        if any(1 < len(each.tokens) == each.logits_to_keep for each in batch.segments):
            self.before_scoring.set()
            assert self.may_score.wait(HANG_S)
            if self.fails_scoring:
                raise ValueError("no score")


def by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    choices = sorted((chunk["choices"][0] for chunk in chunks), key=lambda choice: choice["index"])
    return {i: list(each) for i, each in itertools.groupby(choices, lambda choice: choice["index"])}


def added_up(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the pieces of a streamed choice."""
    logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "logprobs": {
            name: list(itertools.chain.from_iterable(each[name] for each in logprobs)) for name in logprobs[0]
        },
    }


# ---- a prompt is scored once


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("cached", [False, True])
def test_a_prompt_is_scored_once_for_all_choices(
    serve: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, reuse: bool, cached: bool
) -> None:
    """Without a cache every choice computes its prompt, and one of them scores it."""
    prompts, n = [PROMPT, "another one", [65, 66, 67, 0xE2, 0x82]], 5
    tokens = sum(map(len, prompts))
    scored: list[int] = []
    score_prompt = step.score_prompt

    def counted(logits: Any, next_tokens: Any, top: int) -> Logprobs:
        scored.append(len(next_tokens))
        return score_prompt(logits, next_tokens, top)

    monkeypatch.setattr(step, "score_prompt", counted)
    with serve() as served:
        expected = [served.complete(prompt, **ECHO).json()["choices"][0] for prompt in prompts]
    assert sum(scored) == tokens - len(prompts)
    with serve(EngineConfig(chunk_tokens=8), reuse=reuse) as served:
        if cached:
            served.complete(prompts, max_tokens=1)
        scored.clear()
        before = served.runtime.computed_tokens
        fields = {"prompt": prompts, "n": n, **ECHO}
        if stream:
            choices = by_choice(served.chunks(TEXT, **fields))
            got = [added_up(choices[index]) for index in sorted(choices)]
        else:
            got = served.client.post(TEXT, json=fields).json()["choices"]
        assert len(got) == n * len(prompts)
        for index, choice in enumerate(got):
            for name in ("text", "logprobs"):
                assert choice[name] == expected[index // n][name], index
        assert sum(scored) == tokens - len(prompts)
        served.settled()
        if reuse:  # a choice computes at least the last token of its prompt, and less than a block
            decodes = n * len(prompts) * (ECHO["max_tokens"] - 1)
            own = served.runtime.computed_tokens - before - tokens - decodes
            assert (n - 1) * len(prompts) <= own < n * len(prompts) * 8


def test_choices_that_run_ahead_of_the_scores_are_sent_after_their_prompt(serve: Any) -> None:
    scoring = Scoring()
    with serve(EngineConfig(chunk_tokens=16), fault=scoring) as served:
        served.complete(PROMPT, max_tokens=1)  # caches the prompt: the other choices decode at once
        chunks = served.chunks(TEXT, prompt=PROMPT, n=4, **ECHO)
        first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["text"] == PROMPT]
        assert sorted(choice["index"] for choice in first) == [0, 1, 2, 3]
        assert all(choice["logprobs"]["token_logprobs"][0] is None for choice in first)
        for pieces in by_choice(chunks).values():
            assert pieces[0]["text"] == PROMPT
            assert pieces[-1]["finish_reason"] == "length"
            assert len(added_up(pieces)["logprobs"]["tokens"]) == len(PROMPT) + 4


@pytest.mark.parametrize("stream", [False, True])
def test_failed_scores_fail_the_answer_and_release_all_choices(serve: Any, stream: bool) -> None:
    scoring = Scoring()
    with serve(EngineConfig(chunk_tokens=16), fault=scoring) as served:
        served.complete(PROMPT, max_tokens=1)
        scoring.fails_scoring = True
        answer = served.complete(PROMPT, n=4, stream=stream, **ECHO)
        assert answer.status_code == (200 if stream else 500)
        assert "no score" not in answer.text
        assert "ValueError" in answer.text
        assert '"text"' not in answer.text  # no choice was sent without its prompt
        served.settled()
        scoring.fails_scoring = False
        assert len(served.complete(PROMPT, n=4, **ECHO).json()["choices"]) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_while_its_prompt_is_scored_aborts_all_choices(
    serve: Any, stream: bool
) -> None:
    scoring = Scoring()
    scoring.may_score.clear()
    with serve(EngineConfig(chunk_tokens=16), fault=scoring) as served:
        made = served.assembly
        app = create_app(made)
        body = {"prompt": PROMPT, "n": 4, "stream": stream, **ECHO, "max_tokens": 3000}
        leave = partial(asyncio.to_thread, scoring.before_scoring.wait, HANG_S)
        asyncio.run(ask(app, TEXT, body, leave=leave))
        scoring.may_score.set()
        served.settled()
        assert served.complete(PROMPT, max_tokens=1).status_code == 200


# ---- an answer is encoded in pieces


class Piecewise:
    """A client that counts the turns of the loop between two pieces of an answer."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.turns_before: list[int] = []
        self._turns = 0

    def _turn(self) -> None:
        self._turns += 1
        asyncio.get_running_loop().call_soon(self._turn)

    def _received(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.turns_before.append(self._turns)
        self._turns = 0

    async def ask(self, app: Any, body: dict[str, Any]) -> bytes:
        asyncio.get_running_loop().call_soon(self._turn)
        return await ask(app, TEXT, body, self._received)


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_encoded_once_in_pieces_beside_the_loop(
    serve: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    encoded: list[tuple[str, int]] = []  # the thread, and the number of characters

    def noted(values: Any) -> str:
        text = items_text(values)
        encoded.append((threading.current_thread().name, len(text)))
        return text

    monkeypatch.setattr(completion_answers, "items_text", noted)
    n, prompt = 16, "0123456789" * 30
    body = {**ECHO, "prompt": prompt, "logprobs": 20, "n": n, "max_tokens": 0, "stream": stream}
    with serve() as served:
        made = served.assembly
        asker = Piecewise()
        app = create_app(made)
        answer = asyncio.run(asker.ask(app, body))
    assert len(answer) > 10 * CHUNK_CHARACTERS
    assert max(map(len, asker.pieces)) < 2 * CHUNK_CHARACTERS
    # After the first piece, each is made on the encoder's thread, and the loop has turns meanwhile.
    sent = zip(asker.turns_before, asker.pieces, strict=True)
    assert all([turns > 0 for turns, piece in sent if len(piece) >= CHUNK_CHARACTERS][1:])
    threads = [name.startswith("rootstock-encoder") for name, _ in encoded]
    assert all(threads[threads.index(True) :])
    # The prompt's columns were encoded once for all choices.
    assert sum(characters for _, characters in encoded) < 1.5 * len(answer) / n
    assert max(characters for _, characters in encoded) < CHUNK_CHARACTERS


def test_a_small_answer_is_sent_in_one_piece_with_its_length(served: Any) -> None:
    answer = served.complete("small", **ECHO)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["content-type"] == "application/json"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values=st.lists(JSON), member=JSON, cut=st.integers(1, 3))
def test_json_in_pieces_equals_the_value(values: list[Any], member: Any, cut: int) -> None:
    parts = KeptPieces(items_text(values[at : at + cut]) for at in range(0, len(values), cut))
    lazy = {"a": member, "b": {"c": LazyList(parts, parts), "d": LazyList()}, "e": iter(values), "f": {}}
    eager = {"a": member, "b": {"c": values + values, "d": []}, "e": values, "f": {}}
    assert json.loads("".join(in_chunks(json_pieces(lazy)))) == eager


def test_kept_pieces_are_made_once_for_several_readers() -> None:
    made: list[str] = []

    def make() -> Any:
        for text in "abc":
            made.append(text)
            yield text

    kept = KeptPieces(make())
    one, other = iter(kept), iter(kept)
    assert next(one) == next(other) == "a"
    assert list(one) == ["b", "c"]
    assert list(other) == ["b", "c"]
    assert list(kept) == made == ["a", "b", "c"]


def test_a_history_returns_the_logprobs_of_its_events() -> None:
    id, history = RequestId("r"), ChoiceHistory()
    scored = [
        TokenLogprob(7, -0.5, ((7, -0.5), (3, -2.25))),
        TokenLogprob(9, -np.inf, ((1, -0.1), (2, -3.0))),
    ]
    assert history.logprobs is None
    for one in scored:
        history.add(TokenEvent(id, one.token, "x", one))
    history.add(Finished(id, "stop", Usage(1, 0, 2), "!"))
    assert history.text == "xx!"
    assert history.logprobs is not None
    assert list(history.logprobs) == scored
    assert list(Logprobs.joined([history.logprobs[:1], history.logprobs[1:]])) == scored


# ---- the bound on log-probabilities


def call_of(
    prompts: list[int], n: int, max_tokens: int | None, top: int | None, scored: int | None = None
) -> ApiCall:
    requests = tuple(
        Request(
            RequestId(f"{prompt}-{choice}"),
            np.zeros(tokens, np.int32),
            ResolvedSampling(top_logprobs=top),
            StopParams(max_tokens=max_tokens),
            prompt_logprobs=scored if choice == 0 else None,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(n)
    )
    return ApiCall(None, requests, n, stream=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        call_of([8192] * 128, 1, 1, 5, 5),  # an evaluation harness: echo, a few logprobs, a full batch
        call_of([2048] * 512, 1, 0, 1, 1),
        call_of([1000], 32, 16, 20, 20),
        call_of([100], 128, None, None),  # without logprobs there is no bound
        call_of([30_000], 4, None, 20),
    ],
)
def test_requests_of_evaluations_and_clients_are_within_the_bound(call: ApiCall) -> None:
    call.refuse_too_many_logprobs(context_limit=131_072)


def test_the_bound_holds_for_the_product_and_the_context_limits_the_tokens() -> None:
    limit = MAX_LOGPROBS // 4
    call_of([1], 2, limit, 1).refuse_too_many_logprobs(limit + 1)
    with pytest.raises(TooManyLogprobs):
        call_of([1], 2, limit + 1, 1).refuse_too_many_logprobs(limit + 2)
    with pytest.raises(TooManyLogprobs):
        call_of([2, 1], 2, limit // 2, 1, 1).refuse_too_many_logprobs(limit)
    call_of([1], 2, 10**9, 1).refuse_too_many_logprobs(limit + 1)
    with pytest.raises(TooManyLogprobs) as refused:
        call_of([100], 128, None, 20).refuse_too_many_logprobs(100_100)
    for said in ("268,800,000", f"{MAX_LOGPROBS:,}", "100,000", "128", "20", "Lower max_tokens"):
        assert said in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs_are_refused_before_the_first_step(
    serve: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("rootstock.server.wire.api_call.MAX_LOGPROBS", 2 * (5 + 3) * 4)
    with serve() as served:
        fields = {"n": 2, "max_tokens": 3, "logprobs": 3, "echo": True, "stream": stream}
        assert served.complete("12345", **fields).status_code == 200
        served.settled()
        steps = served.assembly.engine.health().steps
        answer = served.complete("123456", **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "too_many_logprobs"
        assert error["param"] == "logprobs"
        chat = served.chat("12", n=1, max_tokens=65, logprobs=True, top_logprobs=0)
        assert chat.json()["error"]["code"] == "too_many_logprobs"
        assert served.assembly.engine.health().steps == steps
