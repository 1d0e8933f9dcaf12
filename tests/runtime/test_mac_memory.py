"""Free memory of a Mac, as a stand-in for its C library tells it: no test here runs on macOS."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest

from rootstock.runtime import host_memory, mac_memory


class Function:
    """Function of a C library: ctypes lets its result type be set."""

    restype: Any = None

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Libc:
    def __init__(self, status: int = 0, known: int = 38) -> None:
        self.mach_host_self = Function(lambda: 1795)

        def host_statistics64(port: Any, flavor: Any, out: Any, count: Any) -> int:
            assert (port.value, flavor.value) == (1795, 4)
            count = ctypes.cast(count, ctypes.POINTER(ctypes.c_uint32)).contents
            assert count.value >= known
            out[0], out[1], out[2], out[3] = 1000, 70_000, 500, 90_000  # free, active, inactive, wired
            count.value = known
            return status

        self.host_statistics64 = host_statistics64


def test_free_and_inactive_pages_are_available() -> None:
    assert mac_memory.available_pages(Libc()) == 1500


@pytest.mark.parametrize("libc", [Libc(status=5), Libc(known=2)], ids=["an error", "too few numbers"])
def test_a_kernel_that_does_not_answer(libc: Libc) -> None:
    assert mac_memory.available_pages(libc) == 0


def test_another_system_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(mac_memory, "available_pages", lambda libc: pytest.fail("asked"))
    assert mac_memory.available_bytes() is None


def test_the_free_memory_of_a_mac_is_what_its_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(mac_memory, "available_pages", lambda libc: 3)
    monkeypatch.setattr(host_memory.Path, "read_text", _no_proc)
    assert host_memory.free_host_bytes() == 3 * host_memory.os.sysconf("SC_PAGE_SIZE")


def _no_proc(self: Any) -> str:
    raise FileNotFoundError(self)
