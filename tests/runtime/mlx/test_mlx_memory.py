"""Memory of MLX: on the CPU build here, and by the figures that a Mac would report."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from rootstock.runtime.mlx import memory
from rootstock.units import GIB, MIB


@pytest.fixture
def limits() -> Iterator[None]:
    before = mx.set_cache_limit(0)
    mx.set_cache_limit(before)
    yield
    mx.set_cache_limit(before)


class Mac:
    """Figures of MLX on a Mac."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, granted: Any = 48 * GIB, active: int = 0) -> None:
        self.wired: list[int] = []
        self.kept: list[int] = []
        monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": granted})
        monkeypatch.setattr(mx, "get_active_memory", lambda: active)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
        monkeypatch.setattr(mx, "set_wired_limit", self.wired.append)
        monkeypatch.setattr(mx, "set_cache_limit", self.kept.append)


def test_the_memory_of_a_cpu_is_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5 * MIB)
    found = memory.device_memory()
    assert found.kind == "unified"
    assert found.free_bytes == 10 * GIB + 5 * MIB - memory.cache_limit_bytes()


def test_the_cache_of_freed_buffers_is_limited(limits: None) -> None:
    memory.limit_memory()
    arrays = [mx.ones((16 * MIB,), mx.uint8) for _ in range(memory.cache_limit_bytes() // (16 * MIB) + 4)]
    mx.eval(arrays)
    del arrays
    mx.eval(mx.ones((16 * MIB,), mx.uint8))
    assert mx.get_cache_memory() <= memory.cache_limit_bytes() + 16 * MIB


@pytest.mark.parametrize(
    ("granted", "kept"),
    [(4 * GIB, 256 * MIB), (32 * GIB, GIB), (48 * GIB, 3 * GIB // 2), (400 * GIB, 2 * GIB)],
)
def test_a_mac_keeps_its_weights_resident_and_few_freed_buffers(
    monkeypatch: pytest.MonkeyPatch, granted: int, kept: int
) -> None:
    mac = Mac(monkeypatch, granted)
    memory.limit_memory()
    assert (mac.wired, mac.kept) == ([granted], [kept])


@pytest.mark.parametrize(
    ("active", "system_free", "free"),
    [(0, 100 * GIB, 48 * GIB), (20 * GIB, 100 * GIB, 28 * GIB), (20 * GIB, 9 * GIB, 9 * GIB)],
)
def test_on_a_mac_the_smaller_of_the_gpus_part_and_the_free_memory_counts(
    monkeypatch: pytest.MonkeyPatch, active: int, system_free: int, free: int
) -> None:
    Mac(monkeypatch, active=active)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: system_free)
    assert memory.free_bytes() == free - memory.cache_limit_bytes()


def test_memory_that_is_used_up_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    Mac(monkeypatch, active=50 * GIB)
    assert memory.free_bytes() == 0


def test_a_device_that_tells_no_limit_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, granted=None)
    memory.limit_memory()
    assert mac.wired == []
