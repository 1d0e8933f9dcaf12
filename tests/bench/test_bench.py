"""`rootstock bench`: workloads played over HTTP, the server that it starts, and its rows and table."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest
from rich.console import Console

from rootstock.bench import benchmark
from rootstock.bench.benchmark import BenchConfig, LoadedModel, OwnServer, run_bench
from rootstock.bench.play import Played
from rootstock.bench.rows import BenchRow, CacheState, make_row, quantiles, same_answers
from rootstock.bench.targets import Sample
from rootstock.bench.workloads import SIZES, Sizes, make_workload
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import assemble
from rootstock.errors import InvalidOption, StartupError
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from waiting import unused_port

SIZES_OF_A_TEST = Sizes(4, 3, turns=3, prefix_tokens=100, new_tokens=(3, 9), answer_tokens=6)


def test_quantiles_interpolate_and_nothing_has_none() -> None:
    found = quantiles([4.0, 1.0, 3.0, 2.0])
    assert found.p50 == 2.5
    assert found.p95 == pytest.approx(3.85)
    assert quantiles([]) is None


def test_a_row_is_json_with_all_fields() -> None:
    fields = json.loads(json.dumps(row_of("cold").as_json()))
    assert fields["schema"] == 2
    assert fields["cached_share"] == 0.5
    assert set(fields) == {
        "schema", "rootstock", "date", "model", "workload", "seed", "cache", "sizes", "requests", "failed", "wall_s",
        "ttft_s", "inter_token_s", "tokens_per_s", "completion_tokens", "prompt_tokens", "cached_tokens",
        "cached_share", "answers_digest",
    }  # fmt: skip
    assert set(fields["ttft_s"]) == set(fields["inter_token_s"]) == {"p50", "p95"}


def test_answers_that_differ_are_told() -> None:
    one, other = row_of("cold"), row_of("warm")
    changed = replace(other, answers_digest="x")
    assert same_answers([one, changed]).startswith("Answers differ between states of the cache in agents.")
    assert same_answers([one, other]) == "Answers: the same in every state of the cache."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    runtime = FakeRuntime(PADDED_LOGITS, 8192)
    made = assemble(runtime, ByteTokenizer(), CacheConfig(budget_bytes=1 << 20), EngineConfig())
    with made.engine, running(create_app(made), made.engine) as url:
        yield url


def test_a_bench_over_a_url_writes_rows_and_ends_with_0(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "agents", SIZES_OF_A_TEST)
    told = io.StringIO()
    config = BenchConfig(("agents",), out=tmp_path / "new")
    assert run_bench(config, LoadedModel(url), Console(file=told, width=100)) == 0
    (lines,) = (tmp_path / "new").iterdir()
    cold, warm = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert url not in lines.read_text()
    assert cold["completion_tokens"] == warm["completion_tokens"] == 12 * 6
    assert 0.5 < cold["cached_share"] < 0.95
    assert warm["prompt_tokens"] - warm["cached_tokens"] == 12  # of each request the last token
    assert "cached" in told.getvalue()


def test_a_bench_without_a_url_starts_a_server_with_its_cache_and_one_without(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Started:
        def __init__(self, options: list[str], ready_within_s: float) -> None:
            started.append(options)
            self.url = url

        def __enter__(self) -> Started:
            return self

        def __exit__(
            self,
            _type: type[BaseException] | None,
            _error: BaseException | None,
            _trace: TracebackType | None,
        ) -> None:
            return None

    monkeypatch.setattr(benchmark, "ServerProcess", Started)
    monkeypatch.setitem(SIZES, "burst", SIZES_OF_A_TEST)
    told = io.StringIO()
    own = OwnServer("a-model", ("--dtype", "float32"))
    assert run_bench(BenchConfig(("burst",)), own, Console(file=told, width=100)) == 0
    options = ["a-model", "--port", "0", "--dtype", "float32"]
    assert started == [options, [*options, "--no-cache"]]
    assert [line.split()[1] for line in told.getvalue().splitlines() if line.startswith("burst")] == [
        *("cold", "warm", "off"),
        *("cold", "warm", "off"),  # of the table
    ]
    assert "Answers: the same in every state of the cache." in told.getvalue()


def test_a_url_without_a_server_is_refused_in_one_line() -> None:
    with unused_port() as port, pytest.raises(StartupError, match="Check --url"):
        run_bench(
            BenchConfig(("burst",)), LoadedModel(f"http://127.0.0.1:{port}"), Console(file=io.StringIO())
        )


@pytest.mark.parametrize(
    "wrong", [{"workloads": ("nope",)}, {"workloads": ()}, {"caches": ("hot",)}, {"scale": 0.0}]
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        BenchConfig(**wrong)  # type: ignore[arg-type]


def test_a_server_cannot_be_measured_with_its_cache_off(url: str) -> None:
    with pytest.raises(InvalidOption, match="off"):
        run_bench(BenchConfig(("burst",), ("off",)), LoadedModel(url), Console(file=io.StringIO()))


def row_of(cache: CacheState) -> BenchRow:
    sample = Sample(0.0, [0.5, 0.6], 0.7, b"an answer", 4, 2, 2)
    return make_row(
        "2031-04-02T10:00:00+00:00", "tiny", make_workload("agents"), cache, Played(((sample,),), 1.0)
    )
