"""Selection of a runtime, and its functions by which a model is loaded.

A runtime's library is imported only when its functions are called.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption
from rootstock.runtime.base import DeviceMemory, Embedder, Runtime
from rootstock.runtime.gguf_files import has_gguf, refuse_gguf
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.model_files import Progress, graph_files, locate, names_here, weight_files
from rootstock.runtime.model_formats import OPENVINO_GRAPH, has_graph, names_in

RuntimeName = Literal["torch", "mlx", "openvino"]

# Devices that torch names. MLX has one GPU at most, and uses it by itself.
_DEVICES_OF_TORCH = ("cuda", "mps")
_REMEDY = "pip install 'rootstock[mlx]' on Apple Silicon, and 'rootstock[torch]' elsewhere"

# The packages of each runtime, and its module with `check_architecture`, `load_model` and `device_memory`.
_PACKAGES: Final[Mapping[RuntimeName, tuple[str, ...]]] = {
    "torch": ("torch",),
    "mlx": ("mlx", "mlx_lm"),
    "openvino": ("openvino",),
}
_LOADERS: Final[Mapping[RuntimeName, str]] = {
    "torch": "rootstock.runtime.torch.runner",
    "mlx": "rootstock.runtime.mlx.load",
    "openvino": "rootstock.runtime.openvino.load",
}
_GGUF = "rootstock.runtime.torch.stored.gguf_directory"


@dataclass(frozen=True, slots=True)
class RuntimeChoice:
    """A runtime, and the reason why it was chosen."""

    runtime: RuntimeName
    reason: str


def choose_runtime(asked: str, device: str = "auto", names: Collection[str] | None = None) -> RuntimeChoice:
    """Returns the runtime for --runtime, --device and the names of a model's files, and the reason. Raises
    InvalidOption.

    "auto" is OpenVINO for its graph of a model. For others it is MLX on Apple Silicon if it is installed, and
    elsewhere only where torch is not installed. Without names, OpenVINO is chosen only if no other is installed.
    """
    if asked != "auto":
        name = cast(RuntimeName, asked)
        if not is_installed(name):
            raise InvalidOption(
                "--runtime", asked, f"a runtime that is installed: pip install 'rootstock[{asked}]'"
            )
        return RuntimeChoice(name, f"--runtime is {asked}")
    has_mlx, has_torch, has_openvino = is_installed("mlx"), is_installed("torch"), is_installed("openvino")
    is_alone = not (has_mlx or has_torch)
    if has_openvino and has_graph(names or ()) and (is_alone or device not in _DEVICES_OF_TORCH):
        return RuntimeChoice("openvino", f"the model has a graph of OpenVINO ({OPENVINO_GRAPH})")
    if has_openvino and is_alone and names is None:
        return RuntimeChoice("openvino", "no other runtime is installed, and it serves its graphs only")
    if is_alone:
        what = "a runtime that is installed"
        if has_graph(names or ()):
            what = "openvino, whose graph the model has: pip install 'rootstock[openvino]'. For others"
        elif has_openvino:
            what = (
                f"a runtime that reads the model. OpenVINO is installed, and reads a graph ({OPENVINO_GRAPH}), which "
                "optimum-cli export openvino makes of the model. Without a graph"
            )
        raise InvalidOption("--runtime", asked, f"{what}: {_REMEDY}")
    if not has_torch:
        return RuntimeChoice("mlx", "torch is not installed")
    if device in _DEVICES_OF_TORCH:
        return RuntimeChoice("torch", f"--device {device} is a device of torch")
    if has_gguf(names or ()):
        return RuntimeChoice("torch", "the model is in GGUF")
    if not is_apple_silicon():
        return RuntimeChoice("torch", "MLX is for Apple Silicon")
    if not has_mlx:
        return RuntimeChoice("torch", "MLX is not installed")
    return RuntimeChoice("mlx", "this is Apple Silicon, and MLX is installed")


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def is_installed(runtime: RuntimeName) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES[runtime])


def leave_out_torch(models: Iterable[ModelConfig]) -> None:
    """Keeps transformers from importing torch for a tokenizer, if no model of this process needs torch.

    For a process that is Rootstock's own: transformers has no models in it. Raises InvalidOption.
    """
    if any(_runtime_of(model) == "torch" for model in models):
        return
    import_transformers_alone()


def import_transformers_alone() -> None:
    """Imports transformers as if torch were absent, unless the process has imported one of them."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    if {"torch", "transformers"} & set(sys.modules):
        return
    # Python takes a module that is None for absent, and transformers remembers that it is.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("transformers")
    finally:
        del sys.modules["torch"]


def _runtime_of(config: ModelConfig) -> RuntimeName:
    """Returns the runtime of a model. MLX, if it is the one, can be imported. Raises InvalidOption."""
    names = names_here(config.model) if config.runtime == "auto" else None
    chosen = choose_runtime(config.runtime, config.device, names).runtime
    if chosen == "mlx":
        try:
            importlib.import_module("mlx.core")
        except ImportError as error:  # its library for this system is a package of its own
            raise InvalidOption(
                "--runtime",
                "mlx",
                f"torch, or install all of MLX: pip install 'rootstock[mlx]' ({error})",
            ) from error
    return chosen


def _loader_of(config: ModelConfig) -> Any:
    """Returns the module that loads a model by its runtime. Raises InvalidOption."""
    with _uncollected():
        return importlib.import_module(_LOADERS[_runtime_of(config)])


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses the garbage collector: the import of a large library makes a million objects, which stay, and each full
    collection visits all of them. It was a seventh of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def locate_model(config: ModelConfig, progress: Progress) -> Path:
    """Returns the model's directory: the given one, or its snapshot from the Hub. Files that are missing there are
    downloaded in the format that the model's runtime reads. Raises ModelError or InvalidOption."""

    def takes_graph(names: Collection[str]) -> bool:
        return choose_runtime(config.runtime, config.device, names).runtime == "openvino"

    def open_gguf(model: str, files: Sequence[Path]) -> Path:
        if choose_runtime(config.runtime, config.device, [file.name for file in files]).runtime != "torch":
            return refuse_gguf(model, files)
        directory: Path = importlib.import_module(_GGUF).directory_of(model, files)
        return directory

    return locate(
        config.model,
        with_code=config.trust_remote_code,
        progress=progress,
        takes_graph=takes_graph,
        open_gguf=open_gguf,
    )


def stored_files(config: ModelConfig, directory: Path) -> list[Path]:
    """Returns the files of a model's weights in the format that its runtime reads. Raises ModelError or
    InvalidOption."""
    chosen = choose_runtime(config.runtime, config.device, names_in(directory)).runtime
    if chosen == "openvino":
        return graph_files(config.model, directory)
    return weight_files(config.model, directory)


def check_architecture(config: ModelConfig, directory: Path) -> None:
    """Checks that the runtime's library knows the model, before minutes of loading weights.

    Raises ModelFileInvalid or ModelUnsupported.
    """
    _loader_of(config).check_architecture(config, directory)


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    demands: Demands | None = None,
    *,
    directory: Path | None = None,
) -> Runtime:
    """Loads a model from a directory or the Hub and self-checks it. The runtime is ready for `allocate`.

    `directory`: the result of `locate_model`, if it was already called. Raises InvalidOption or ModelError.
    """
    runtime: Runtime = _loader_of(config).load_model(config, progress, demands, directory=directory)
    return runtime


def leave_to_engine_thread(config: ModelConfig) -> None:
    """Ends the calling thread's team of compute threads: from here on only the engine's thread computes."""
    if _runtime_of(config) == "torch":
        from rootstock.kernels.cpu.threads import end_team

        end_team()


def load_embedder(config: ModelConfig, directory: Path, demands: Demands | None = None) -> Embedder:
    """Loads an embedding model. Raises InvalidOption or ModelError."""
    if config.runtime not in ("auto", "torch"):
        raise InvalidOption("--runtime", config.runtime, "auto or torch, which computes embedding models")
    if not is_installed("torch"):
        raise InvalidOption(
            "--runtime", config.runtime, "torch for an embedding model: pip install 'rootstock[torch]'"
        )
    from rootstock.runtime.torch import embedder

    return embedder.load_embedder(config, directory, demands)


def device_memory(config: ModelConfig) -> DeviceMemory:
    """Returns the memory in which a model's pools will be, before it is loaded. Raises InvalidOption."""
    memory: DeviceMemory = _loader_of(config).device_memory(config.device)
    return memory
