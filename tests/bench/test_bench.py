"""Workloads played against an engine and over HTTP, and their results: rows, a table, a picture."""

from __future__ import annotations

import io
import itertools
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rootstock.bench.benchmark import BenchConfig, ServedModel, run_bench, write_results
from rootstock.bench.machine import Machine, Source, this_machine, this_source
from rootstock.bench.play import Played, least_possible, play
from rootstock.bench.report import same_answers, table_of
from rootstock.bench.rows import CacheState, Row, Setting, make_row, quantiles
from rootstock.bench.targets import EngineTarget, Sample
from rootstock.bench.workloads import SIZES, Sizes, make_workload
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import Assembly, assemble
from rootstock.errors import InvalidOption, StartupError
from rootstock.runtime.base import Batch
from rootstock.server.app import create_app
from rootstock.server.listen import running
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from waiting import unused_port

SIZES_OF_A_TEST = Sizes(4, 3, turns=3, prefix_tokens=100, new_tokens=(3, 9), answer_tokens=6)
SETTING = Setting(
    Source("abc", changed=False),
    Machine("a processor", 2, 4.0),
    "2031-04-02T10:00:00+00:00",
    "in process",
    "tiny",
    1000,
    "float32",
    "cpu",
)


def engine_of(runtime: FakeRuntime | None = None, *, enabled: bool = True) -> Assembly:
    runtime = runtime or FakeRuntime(PADDED_LOGITS, 8192)
    return assemble(
        runtime, ByteTokenizer(), CacheConfig(budget_bytes=1 << 20, enabled=enabled), EngineConfig()
    )


def played_on(made: Assembly, name: str = "agents") -> Played:
    with made.engine:
        return play(
            make_workload(name, 0, SIZES_OF_A_TEST), EngineTarget(made.engine, made.description.vocab_size)
        )


def test_quantiles_interpolate_and_nothing_has_none() -> None:
    found = quantiles([4.0, 1.0, 3.0, 2.0])
    assert found.p50 == 2.5
    assert found.p95 == pytest.approx(3.85)
    assert quantiles([]) is None


@pytest.mark.parametrize("name", SIZES)
def test_every_request_of_a_workload_is_answered_in_turn(name: str) -> None:
    played = played_on(engine_of(), name)
    assert [len(conversation) for conversation in played.samples] == [3] * 4
    for conversation in played.samples:
        for sample in conversation:
            assert sample.error is None
            assert len(sample.answer) == len(sample.token_times) == sample.completion_tokens == 6
        for before, after in itertools.pairwise(conversation):
            history = np.concatenate([before.prompt, before.answer])
            assert np.array_equal(after.prompt[: len(history)], history)
            assert before.ended_at <= after.sent_at


def test_no_more_conversations_are_open_than_the_workload_says() -> None:
    spans = [(each[0].sent_at, each[-1].ended_at) for each in played_on(engine_of()).samples]
    at_once = [sum(begin <= start < end for begin, end in spans) for start, _ in spans]
    assert max(at_once) == SIZES_OF_A_TEST.at_once


def test_a_cold_cache_computes_the_least_possible() -> None:
    played = played_on(engine_of())
    row = make_row(SETTING, make_workload("agents", 0, SIZES_OF_A_TEST), "cold", played, exact=True)
    assert row.computed_tokens == row.least_tokens == least_possible(played).tokens


def test_a_warm_cache_computes_one_token_a_request_and_answers_the_same() -> None:
    workload, made = make_workload("chat", 0, SIZES_OF_A_TEST), engine_of()
    with made.engine:
        target = EngineTarget(made.engine, made.description.vocab_size)
        cold, warm = play(workload, target), play(workload, target)
    before = make_row(SETTING, workload, "cold", cold, exact=True)
    after = make_row(SETTING, workload, "warm", warm, exact=True, before=cold)
    assert after.computed_tokens == after.least_tokens == workload.requests
    assert before.answers_digest == after.answers_digest
    assert "the same" in same_answers([before, after])


def test_without_the_cache_every_prompt_token_is_computed_and_the_answers_stay() -> None:
    workload = make_workload("agents", 0, SIZES_OF_A_TEST)
    on = make_row(SETTING, workload, "cold", played_on(engine_of()), exact=True)
    off = make_row(SETTING, workload, "off", played_on(engine_of(enabled=False)), exact=True)
    assert off.computed_tokens == off.prompt_tokens
    assert off.least_tokens == on.least_tokens
    assert off.answers_digest == on.answers_digest


def test_a_request_that_fails_ends_its_conversation_and_is_counted() -> None:
    failures = iter([None] * 4 + [RuntimeError("a step that fails")])

    def fault(batch: Batch) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    workload = make_workload("agents", 0, SIZES_OF_A_TEST)
    played = played_on(engine_of(FakeRuntime(PADDED_LOGITS, 8192, fault=fault)))
    row = make_row(SETTING, workload, "cold", played, exact=True)
    assert row.failed >= 1
    assert any("RuntimeError" in (sample.error or "") for sample in played.flat)
    assert "failed" in str(table_of([row]).caption)


def test_a_row_is_json_with_all_fields() -> None:
    row = row_of("cold")
    fields = json.loads(json.dumps(row.as_json()))
    assert fields["schema"] == 1
    assert fields["machine"] == {"cpu": "a processor", "cores": 2, "ram_gib": 4.0, "accelerator": None}
    assert set(fields) == {
        "schema", "commit", "changed", "machine", "date", "target", "model", "parameters", "dtype", "device",
        "runtime", "workload", "seed", "cache", "sizes", "requests", "failed", "wall_s", "ttft_s", "inter_token_s",
        "tokens_per_s", "completion_tokens", "prompt_tokens", "cached_tokens", "computed_tokens", "least_tokens",
        "least_is_exact", "answers_digest",
    }  # fmt: skip
    assert set(fields["ttft_s"]) == set(fields["inter_token_s"]) == {"p50", "p95"}


def test_results_are_lines_of_json_and_a_picture(tmp_path: Path) -> None:
    lines, picture = write_results([row_of("cold"), row_of("warm"), row_of("off")], tmp_path / "new")
    assert [json.loads(line)["cache"] for line in lines.read_text().splitlines()] == ["cold", "warm", "off"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_answers_that_differ_are_told() -> None:
    one, other = row_of("cold"), row_of("warm")
    changed = Row(**{name: getattr(other, name) for name in Row.__slots__} | {"answers_digest": "x"})  # type: ignore[arg-type]
    assert same_answers([one, changed]).startswith("Answers differ between states of the cache in agents.")


def test_machine_and_source_name_no_hosts_or_folders() -> None:
    machine, source = this_machine(), this_source()
    assert machine.cores >= 1
    assert platform.node() not in repr((machine, source))
    assert str(Path.home()) not in repr((machine, source))
    assert source.commit is None or re.fullmatch("[0-9a-f]{12}", source.commit)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    made = engine_of()
    with made.engine, running(create_app(made), made.engine) as url:
        yield url


def test_a_bench_over_a_url_writes_rows_and_ends_with_0(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "agents", SIZES_OF_A_TEST)
    told = io.StringIO()
    config = BenchConfig(("agents",), out=tmp_path)
    assert run_bench(config, ServedModel(url), Console(file=told, width=100)) == 0
    (lines,) = tmp_path.glob("*.jsonl")
    cold, warm = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert cold["target"] == "url"
    assert url not in lines.read_text()
    assert not cold["least_is_exact"]
    assert warm["computed_tokens"] == warm["least_tokens"] == 12
    # A token of this server is a byte, so that the estimate misses special tokens only.
    assert cold["computed_tokens"] == pytest.approx(cold["least_tokens"], rel=0.2)
    assert "least" in told.getvalue()


def test_a_url_without_a_server_is_refused_in_one_line() -> None:
    with unused_port() as port, pytest.raises(StartupError, match="Check --url"):
        run_bench(
            BenchConfig(("burst",)), ServedModel(f"http://127.0.0.1:{port}"), Console(file=io.StringIO())
        )


@pytest.mark.parametrize(
    "wrong", [{"workloads": ("nope",)}, {"workloads": ()}, {"caches": ("hot",)}, {"scale": 0.0}]
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        BenchConfig(**wrong)  # type: ignore[arg-type]


def test_a_server_cannot_be_measured_with_its_cache_off(url: str) -> None:
    with pytest.raises(InvalidOption, match="off"):
        run_bench(BenchConfig(("burst",), ("off",)), ServedModel(url), Console(file=io.StringIO()))


def row_of(cache: CacheState) -> Row:
    sample = Sample(0.0, np.array([1, 2, 3]), [0.5, 0.6], 0.7, np.array([4, 5]), 3, 0, 2)
    return make_row(SETTING, make_workload("agents"), cache, Played(((sample,),), 1.0), exact=True)
