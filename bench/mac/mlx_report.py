"""Report of a Mac: measures the MLX runtime on the user's machine, in a file to attach to an issue.

    mlx_report.py [FILE] [--model MODEL] [--small]     # or: make mac-report

The first row describes the machine. Each further row is one case of a measurement, with its figures, with the reason
why it was skipped, or with its error. Rows are written as they are found. Nothing is sent anywhere. Exit status 0
only if the report is complete.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from isolated import Figures, Job, Outcome, run_case
from rich.console import Console
from scrub import Scrub, scrubber

from rootstock._version import __version__
from rootstock.cli.machine import this_machine
from rootstock.engine.memory_watch import auto_limit_bytes
from rootstock.errors import InvalidOption, StartupError
from rootstock.runtime.host_memory import free_host_bytes, total_host_bytes
from rootstock.runtime.model_files import locate
from rootstock.runtime.select import is_installed
from rootstock.units import GIB, in_units

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from source import this_source  # noqa: E402  # found by the line above

SCHEMA = 1  # raised when a field changes its meaning
DEFAULT_FILE = Path("mlx-report.jsonl")

COMMAND = (sys.executable, "-X", "faulthandler", str(HERE / "mlx_measurements.py"))
_MOST_CHARS = 4000  # of a text
_MOST_TOLD = 160  # characters on the terminal
_MOST_ENTRIES = 64  # of a list or an object
_SHARE_OF_MODEL = 0.7  # of the report's time, after which no case of a whole model begins
_LONG_CASES = 4  # times as long as others may those run that read or make all weights
_MOST_TIMEOUTS = 2  # of a measurement, before the rest of it is skipped
_PACKAGES = ("mlx", "mlx-metal", "mlx-lm", "numpy", "transformers", "safetensors")

# (query heads, KV heads, key_dim, value_dim, block size, features) of layers for which the kernel is compiled.
_KERNEL_SHAPES = (
    (32, 8, 128, 128, 32, ()),
    (32, 8, 128, 128, 32, ("int8",)),
    (8, 8, 64, 64, 16, ()),
    (14, 2, 64, 64, 32, ()),
    (32, 32, 96, 96, 32, ()),
    (16, 8, 256, 256, 32, ("softcap",)),
    (64, 8, 64, 64, 32, ("sinks",)),
    (16, 16, 192, 128, 32, ()),
    (16, 1, 576, 512, 32, ("shares_values",)),
)

Case = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a report's cases."""

    seconds: float  # of the whole report
    case_seconds: float
    array_mib: int
    pool_mib: tuple[int, ...]
    writes: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]  # of one layer
    splits: tuple[int, ...]
    dtype: str
    kernel_dtypes: tuple[str, ...]
    kernel_shapes: int  # how many of _KERNEL_SHAPES
    model_contexts: tuple[int, ...]
    decodes: tuple[int, ...]  # beside a suffix
    prompt_tokens: int
    chunk_tokens: int
    blocks: int  # whose rows are read and written
    model: Mapping[str, Any]


_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
FULL = Sizes(
    seconds=20 * 60,
    case_seconds=90,
    array_mib=512,
    pool_mib=(64, 256, 1024),
    writes=100,
    rows=(1, 2, 4, 8, 16),
    contexts=(512, 1024, 2048, 4096, 8192, 16384, 32768),
    splits=(1, 2, 4, 8, 16, 32, 64),
    dtype="bfloat16",
    kernel_dtypes=("bfloat16", "float16", "float32"),
    kernel_shapes=len(_KERNEL_SHAPES),
    model_contexts=(512, 4096, 16384),
    decodes=(0, 1, 4, 8),
    prompt_tokens=4096,
    chunk_tokens=512,
    blocks=16,
    # 0.5 B parameters, with the heads of larger models
    model={
        **_LLAMA,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32000,
    },
)
SMALL = Sizes(
    seconds=5 * 60,
    case_seconds=60,
    array_mib=16,
    pool_mib=(16,),
    writes=10,
    rows=(1, 2),
    contexts=(64,),
    splits=(1, 2),
    dtype="float32",
    kernel_dtypes=("float32",),
    kernel_shapes=2,
    model_contexts=(64,),
    decodes=(0, 2),
    prompt_tokens=64,
    chunk_tokens=32,
    blocks=2,
    model={
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 256,
    },
)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """Options of a report."""

    out: Path
    model: str | None = None  # a directory or a hub name; None: a llama of random weights
    sizes: Sizes = FULL
    command: Sequence[str] = COMMAND  # that runs a case
    memory_bytes: int | None = None  # of a case's process; None: by the machine's memory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=DEFAULT_FILE, help="a new file")
    parser.add_argument("--model", help="model directory or Hub name; a llama of random weights unless given")
    parser.add_argument("--small", action="store_true", help="few and small cases, also without a Mac")
    given = parser.parse_args()
    try:
        return run_mlx_report(ReportConfig(given.file, given.model, SMALL if given.small else FULL))
    except KeyboardInterrupt:
        return 130
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return 2


def run_mlx_report(config: ReportConfig, console: Console | None = None) -> int:
    """Writes the report, and returns the exit status: 0 if it is complete. Raises StartupError."""
    console = console or Console()
    if not is_installed("mlx"):
        raise StartupError(
            "The report needs MLX and mlx-lm. `make setup` installs them on Macs and on Linux."
        )
    private = [] if config.model is None else [config.model, Path(config.model).name]
    model = None
    if config.model is not None:
        model = locate(config.model, with_code=False, progress=lambda stage, done: None)
        private += [str(model), str(model.resolve())]
    memory = config.memory_bytes or memory_of_a_case()
    device = run_case(Job("device", {}, memory), config.command)
    if device.figures.get("metal") is False and config.sizes is FULL:
        raise StartupError(
            "MLX computes without Metal here, which would take hours. Try --small: make mac-report ARGS=--small"
        )
    try:
        file = config.out.open("x", encoding="utf-8")
    except FileExistsError:
        raise InvalidOption("FILE", str(config.out), "a new file: this one exists") from None
    except OSError as error:
        raise InvalidOption("FILE", str(config.out), f"a file to write ({error.strerror})") from error
    with file, tempfile.TemporaryDirectory(prefix="rootstock-model-") as folder:
        report = _Report(config, file, console, scrubber([*private, folder]), memory)
        try:
            report.run(device, model, Path(folder))
        except KeyboardInterrupt:
            console.print("Stopped. The file has the rows up to here.")
            raise
        finally:
            report.tell_where()
    return 0 if report.is_complete else 1


@dataclass(slots=True)
class _Report:
    config: ReportConfig
    file: TextIO
    console: Console
    scrub: Scrub
    _memory: int  # bytes that a case may take
    is_complete: bool = True
    _rows: int = 0
    _errors: int = 0
    _skipped: int = 0
    _timeouts: dict[str, int] = field(default_factory=dict)
    _kernel_works: bool = False  # for a layer like those of the measurement of attention
    _until: float = math.inf  # when the remaining cases are skipped

    def run(self, device: Outcome, model: Path | None, folder: Path) -> None:
        sizes = self.config.sizes
        self._write("machine", {}, Outcome({**_machine(), "case_memory_bytes": self._memory}, 0.0))
        self._write("device", {}, device)
        if "metal" not in device.figures:
            self.is_complete = False
            self.console.print("MLX does not start on this machine. The report ends here.")
            return
        began = time.monotonic()
        self._until = began + _SHARE_OF_MODEL * sizes.seconds
        for measurement, case in _first_cases(sizes):
            outcome = self._measure(measurement, case)
            if measurement == "kernel" and case == _kernel(sizes.dtype, 0):
                self._kernel_works = outcome.figures.get("agrees") is True
        self._measure_model(model, folder)
        self._until = began + sizes.seconds
        for measurement, case in _layer_cases(sizes):
            self._measure(measurement, case)

    def _measure_model(self, model: Path | None, folder: Path) -> None:
        sizes = self.config.sizes
        if model is None:
            model = folder / "model"
            made = self._measure("model", {"config": dict(sizes.model)}, str(model))
            if made.error or made.skipped:
                self.is_complete = False
                return
        loaded = self._measure("load", {}, str(model))
        has_kernel = bool(loaded.figures.get("counters", {}).get("attentions_by_kernel"))
        for measurement, case in _model_cases(sizes):
            # A kernel that hangs must not take the figures of the other ways with it.
            kernel = has_kernel and not self._timeouts.get(measurement)
            self._measure(measurement, {**case, "kernel": kernel}, str(model))

    def _measure(self, measurement: str, case: Case, model: str | None = None) -> Outcome:
        outcome = self._refused(measurement)
        if outcome is None:
            seconds = self.config.sizes.case_seconds * (
                _LONG_CASES if measurement in ("model", "load") else 1
            )
            job = Job(measurement, case, self._memory, seconds, model)
            with self.console.status(f"{measurement} {_words(case)}"):
                outcome = run_case(job, self.config.command)
        if outcome.timed_out:
            self._timeouts[measurement] = self._timeouts.get(measurement, 0) + 1
        return self._write(measurement, case, outcome)

    def _refused(self, measurement: str) -> Outcome | None:
        """Returns the outcome of a case that is not worth its time, or None."""
        reason = None
        if time.monotonic() >= self._until:
            reason = "the time of the report was over"
            self.is_complete = False
        elif self._timeouts.get(measurement, 0) >= _MOST_TIMEOUTS:
            reason = "earlier cases of this measurement took too long"
        elif measurement == "attention by kernel" and not self._kernel_works:
            reason = "the kernel does not work for such a layer here: see the rows of the measurement kernel"
        return None if reason is None else Outcome({}, 0.0, skipped=reason)

    def _write(self, measurement: str, case: Case, outcome: Outcome) -> Outcome:
        row: dict[str, Any] = {"schema": SCHEMA, "measurement": measurement, "case": dict(case)}
        if outcome.figures:
            row["figures"] = outcome.figures
        for name, text in (("error", outcome.error), ("skipped", outcome.skipped)):
            if text is not None:
                row[name] = text
        row["seconds"] = outcome.seconds
        row = published(row, self.scrub)
        self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.file.flush()
        self._rows += 1
        self._errors += outcome.error is not None
        self._skipped += outcome.skipped is not None
        self.console.print(_line(row), highlight=False, markup=False, soft_wrap=True)
        return outcome

    def tell_where(self) -> None:
        """Prints where the file is and how to attach it."""
        size = in_units(self.config.out.stat().st_size)
        kept = " An error is a finding: please keep its row." if self._errors else ""
        self.console.print(
            f"\n{self._rows} rows, {self._errors} with an error, {self._skipped} skipped.{kept}\n"
            f"The report is {self.config.out.resolve()} ({size}).\n"
            "Names and paths are removed from its texts, and it was sent nowhere. Look through it, then attach it to "
            "an issue of Rootstock.",
            highlight=False,
            soft_wrap=True,
        )


def memory_of_a_case() -> int:
    """Returns the memory that a case may take: as much as a server on this machine, and no more than is free."""
    return max(GIB, min(auto_limit_bytes(total_host_bytes()), int(free_host_bytes() * 0.8)))


# ---- cases


def all_cases(sizes: Sizes) -> list[tuple[str, Case]]:
    """Returns the cases of a report on which everything works, after the machine and its device."""
    model: tuple[str, Case] = ("model", {"config": dict(sizes.model)})
    return [*_first_cases(sizes), model, ("load", {}), *_model_cases(sizes), *_layer_cases(sizes)]


def _first_cases(sizes: Sizes) -> Iterator[tuple[str, Case]]:
    """Yields the cases that need no model: memory, the kernel's results, and writes to pools."""
    yield "memory", {"array_mib": sizes.array_mib}
    for dtype in sizes.kernel_dtypes:
        for number in range(sizes.kernel_shapes):
            yield "kernel", _kernel(dtype, number)
    for pool_mib in sizes.pool_mib:
        for scattered in (True, False):
            for synchronize in (True, False):
                yield "pool writes", _writes(sizes, pool_mib, scattered=scattered, synchronize=synchronize)
    # A slice that is held makes each write a copy. This case shows whether copies are seen.
    yield "pool writes", _writes(sizes, sizes.pool_mib[0], scattered=True, synchronize=True, slice_held=True)


def _kernel(dtype: str, number: int) -> Case:
    """Returns the case of one of _KERNEL_SHAPES."""
    *sizes, features = _KERNEL_SHAPES[number]
    names = ("q_heads", "kv_heads", "key_dim", "value_dim", "block_size")
    return {
        "dtype": dtype,
        **dict(zip(names, sizes, strict=True)),
        **{name: name in features for name in ("int8", "shares_values", "sinks", "softcap")},
    }


def _writes(
    sizes: Sizes, pool_mib: int, *, scattered: bool, synchronize: bool, slice_held: bool = False
) -> Case:
    """Returns a case of writes to scattered slots, as for a batch, or to a run of them, as for one sequence."""
    return {
        "pool_mib": pool_mib,
        "writes": sizes.writes,
        "scattered": scattered,
        "synchronize": synchronize,
        "slice_held": slice_held,
    }


def _model_cases(sizes: Sizes) -> Iterator[tuple[str, Case]]:
    """Yields the cases of a whole model that loads."""
    contexts = sizes.model_contexts
    for context in contexts:
        for rows in sizes.rows:
            yield "step", {"rows": rows, "context": context}
    for decodes in sizes.decodes:
        yield "suffix", {"decodes": decodes, "context": contexts[len(contexts) // 2]}
    yield "prefill", {"tokens": sizes.prompt_tokens, "chunk": sizes.chunk_tokens}
    yield "rows", {"blocks": sizes.blocks}


def _layer_cases(sizes: Sizes) -> Iterator[tuple[str, Case]]:
    """Yields the cases of one layer's attention, short contexts first."""
    for context in sizes.contexts:
        for rows in sizes.rows:
            case = {"rows": rows, "context": context, "dtype": sizes.dtype}
            yield "attention", case
            yield "attention by kernel", {**case, "splits": list(sizes.splits)}


# ---- rows


def _machine() -> Figures:
    """Returns the description of machine and software, without names."""
    machine, source = this_machine(), this_source()
    return {
        "chip": machine.cpu,
        "cores": machine.cores,
        "memory_gib": machine.ram_gib,
        "system": platform.system(),
        "system_version": platform.mac_ver()[0] or platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "rootstock": __version__,
        "commit": source.commit,
        "changed": source.changed,
        "packages": {name: _version(name) for name in _PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def published(value: Any, scrub: Scrub) -> Any:
    """Returns a JSON value of bounded size, without personal data, and with numbers that JSON has."""
    if isinstance(value, str):
        text = scrub(value)
        return (
            text
            if len(text) <= _MOST_CHARS
            else f"{text[: _MOST_CHARS * 3 // 4]}\n…\n{text[-_MOST_CHARS // 4 :]}"
        )
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): published(its, scrub) for name, its in list(value.items())[:_MOST_ENTRIES]}
    if isinstance(value, (list, tuple)):
        return [published(its, scrub) for its in value[:_MOST_ENTRIES]]
    return value


def _line(row: Mapping[str, Any]) -> str:
    """Returns the line of a row on the terminal."""
    if "error" in row:
        told = f"error: {row['error'].splitlines()[0]}"
    elif "skipped" in row:
        told = f"skipped: {row['skipped']}"
    else:
        told = ", ".join(_told(row.get("figures", {})))
    told = told if len(told) <= _MOST_TOLD else f"{told[: _MOST_TOLD - 1]}…"
    return f"{row['seconds']:5.1f} s  {row['measurement']} {_words(row['case'])}".rstrip() + f": {told}"


def _words(case: Case) -> str:
    """Returns a case in a few words, without its lists and objects."""
    words = []
    for name, value in case.items():
        if isinstance(value, bool):
            words += [name] * value
        elif not isinstance(value, (list, dict)):
            words.append(f"{name}={value}")
    return " ".join(words)


def _told(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the times of a row's ways, and its plain figures."""
    for name, value in figures.items():
        if name.endswith("_bytes") and isinstance(value, int):
            yield f"{name.removesuffix('_bytes')} {in_units(value)}"
        elif not isinstance(value, Mapping):
            if isinstance(value, (bool, int, float, str)) and value != "":
                yield f"{name} {value}"
        elif "error" in value:
            yield f"{name}: error"
        elif "median_ms" in value:
            yield f"{name} {value['median_ms']:.3g} ms"
        elif "tokens_per_s" in value:
            yield f"{name} {value['tokens_per_s']:.0f} tokens/s"
        else:
            yield from (f"{name}, {told}" for told in _told(value) if told.endswith(" ms"))


if __name__ == "__main__":
    sys.exit(main())
