"""LoRA adapters of an engine: namespaces of their own, names, and unloading while requests run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import tiny_model
from engine.helpers import Bench, Families, numbers, of_kinds
from engine.tiered import Tiered
from lora import linears_of, save_adapter
from rootstock.errors import AdapterExists, AdapterNotLoaded, AdapterUnusable
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window

PROMPT = numbers(1, 20)
MODEL = tiny_model("llama")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(root / name, MODEL, linears_of(MODEL, "q_proj"), seed=n) for n, name in enumerate("ab")
    ]


@pytest.mark.behaviour(9)
@of_kinds([(FULL,), (FULL, window(6)), (FULL, STATE)])
def test_adapters_share_no_prefix_with_each_other_or_the_base(
    adapters: list[Path], families: Families
) -> None:
    bench = Bench(families=families)
    chosen = ["", *(bench.engine.load_adapter(path.name, path).fingerprint for path in adapters)]
    assert len(set(chosen)) == 3
    for turn in range(3):  # the second request leaves the checkpoint of states at which the third resumes
        clients = [bench.ask(PROMPT, max_tokens=6, adapter=adapter) for adapter in chosen]
        bench.run()
        for client, adapter in zip(clients, chosen, strict=True):
            assert client.tokens == bench.alone(PROMPT, 6, adapter)
            assert turn or client.finished.usage.cached_tokens == 0
            assert turn < 2 or client.finished.usage.cached_tokens > 0
    assert (
        bench.engine.explain(
            np.array(PROMPT, np.int32), bench.engine.namespace(adapter=chosen[1])
        ).matched_tokens
        > 0
    )
    assert (
        bench.engine.explain(
            np.array(PROMPT, np.int32), bench.engine.namespace("another", chosen[1])
        ).matched_tokens
        == 0
    )


@pytest.mark.behaviour(46)
def test_clearing_a_tenant_clears_its_prefixes_of_every_adapter(adapters: list[Path]) -> None:
    bench = Bench()
    adapter = bench.engine.load_adapter("a", adapters[0]).fingerprint
    for salt in ("one", "two"):
        bench.ask(PROMPT, max_tokens=2, adapter=adapter, salt=salt)
    bench.run()
    bench.engine.unload_adapter("a")
    bench.engine.clear_cache("one")
    bench.cache.check()
    prompt = np.array(PROMPT, np.int32)
    assert bench.engine.explain(prompt, bench.engine.namespace("one", adapter)).matched_tokens == 0
    assert bench.engine.explain(prompt, bench.engine.namespace("two", adapter)).matched_tokens > 0, (
        "a later load finds them"
    )


@pytest.mark.behaviour(40)
def test_records_on_disk_are_of_one_adapter(adapters: list[Path], tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        one, other = (bench.engine.load_adapter(path.name, path).fingerprint for path in adapters)
        bench.answer(PROMPT, adapter=one)
        bench.forget()
        assert bench.answer([*PROMPT, 7], adapter=other).cached_tokens == 0
        assert bench.answer([*PROMPT, 7]).cached_tokens == 0
        bench.forget()
        assert bench.answer([*PROMPT, 7], adapter=one).cached_tokens == len(PROMPT), "from the disk"


def test_an_unloaded_adapter_serves_its_last_requests(adapters: list[Path]) -> None:
    bench = Bench()
    runtime = bench.runtime
    assert isinstance(runtime, FakeRuntime)
    adapter = bench.engine.load_adapter("a", adapters[0]).fingerprint
    client = bench.ask(PROMPT, max_tokens=5, adapter=adapter)
    bench.engine.step()
    bench.engine.unload_adapter("a")
    with pytest.raises(AdapterNotLoaded):
        bench.engine.unload_adapter("a")
    assert runtime.adapters == {adapter}
    bench.run()
    assert client.tokens == bench.alone(PROMPT, 5, adapter)
    assert runtime.adapters == set()
    with pytest.raises(AdapterNotLoaded):
        bench.ask(PROMPT, max_tokens=5, adapter=adapter)


def test_two_names_share_an_adapters_weights(adapters: list[Path]) -> None:
    bench = Bench()
    runtime = bench.runtime
    assert isinstance(runtime, FakeRuntime)
    one, other = (bench.engine.load_adapter(name, adapters[0]) for name in ("one", "other"))
    assert one.fingerprint == other.fingerprint
    bench.engine.unload_adapter("one")
    assert runtime.adapters == {one.fingerprint}
    bench.engine.unload_adapter("other")
    assert runtime.adapters == set()


def test_a_name_is_of_one_adapter(adapters: list[Path], tmp_path: Path) -> None:
    bench = Bench()
    bench.engine.load_adapter("a", adapters[0])
    with pytest.raises(AdapterExists):
        bench.engine.load_adapter("a", adapters[1])
    with pytest.raises(AdapterUnusable):
        bench.engine.load_adapter("b", tmp_path)
    assert [named.name for named in bench.engine.adapters.all] == ["a"]


def test_a_request_of_an_unknown_adapter_is_refused() -> None:
    with pytest.raises(AdapterNotLoaded):
        Bench().ask(PROMPT, max_tokens=5, adapter="unknown")
