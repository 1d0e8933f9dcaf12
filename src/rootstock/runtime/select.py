"""Selection of a runtime, and its functions by which a model is loaded.

A runtime's library is imported only when its functions are called.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from typing import Literal

from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption
from rootstock.runtime.base import DeviceMemory, Embedder, Runtime
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.model_files import Progress

RuntimeName = Literal["torch", "mlx"]


def select_runtime(asked: str) -> RuntimeName:
    """Returns the runtime for --runtime; "auto" is MLX on Apple Silicon if it is installed. Raises InvalidOption."""
    match asked:
        case "auto":
            if _is_apple_silicon() and _has_mlx():
                return "mlx"
            if not _has("torch"):
                if _has_mlx():
                    return "mlx"
                raise InvalidOption("--runtime", asked, "torch or mlx, and neither is installed: install one")
            return "torch"
        case "mlx":
            if not _has_mlx():
                raise InvalidOption("--runtime", asked, "torch, or install it: pip install 'rootstock[mlx]'")
            return "mlx"
        case _:
            if not _has("torch"):
                raise InvalidOption("--runtime", asked, "mlx, or install it: pip install 'rootstock[torch]'")
            return "torch"


def _is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _has_mlx() -> bool:
    return _has("mlx") and _has("mlx_lm")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check_architecture(config: ModelConfig, directory: Path) -> None:
    """Checks that the runtime's library knows the model, before minutes of loading weights.

    Raises ModelFileInvalid or ModelUnsupported.
    """
    if select_runtime(config.runtime) == "mlx":
        from rootstock.runtime.mlx.weights import check_architecture

        check_architecture(config.model, directory)
    else:
        from rootstock.runtime.torch.weights import read_config

        read_config(config.model, directory, trust_remote_code=config.trust_remote_code)


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    demands: Demands | None = None,
    *,
    directory: Path | None = None,
) -> Runtime:
    """Loads a model from a directory or the Hub and self-checks it. The runtime is ready for `allocate`.

    `directory`: the result of `locate`, if it was already called. Raises InvalidOption or ModelError.
    """
    if select_runtime(config.runtime) == "mlx":
        from rootstock.runtime.mlx import load as mlx_load

        return mlx_load.load_model(config, progress, demands, directory=directory)
    from rootstock.runtime.torch import runner as torch_runner

    return torch_runner.load_model(config, progress, demands, directory=directory)


def leave_to_engine_thread(config: ModelConfig) -> None:
    """Ends what the calling thread has left of its computations: from here on only the engine's thread computes."""
    if select_runtime(config.runtime) == "torch":
        from rootstock.kernels.cpu.threads import end_team

        end_team()


def load_embedder(config: ModelConfig, directory: Path, demands: Demands | None = None) -> Embedder:
    """Loads an embedding model. Raises InvalidOption or ModelError."""
    if config.runtime == "mlx" or not _has("torch"):
        raise InvalidOption("--runtime", config.runtime, "torch: the MLX runtime has no embedding models")
    from rootstock.runtime.torch import embedder

    return embedder.load_embedder(config, directory, demands)


def device_memory(config: ModelConfig) -> DeviceMemory:
    """Returns the memory in which a model's pools will be, before it is loaded. Raises InvalidOption."""
    if select_runtime(config.runtime) == "mlx":
        from rootstock.runtime.mlx import memory

        return memory.device_memory()
    from rootstock.runtime.torch import runner

    return runner.device_memory(config.device)
