"""Errors of a start: options, files and models."""

from __future__ import annotations

from pathlib import Path

from rootstock.errors.base import RootstockError, quoted, shown
from rootstock.units import in_units


class StartupError(RootstockError):
    code = "startup_error"


class InvalidOption(StartupError):
    code = "invalid_option"

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {quoted(value)}, but must be {allowed}.")
        self.option = option
        self.value = value
        self.allowed = allowed


class MemoryLacks(InvalidOption):
    """A size beyond the memory that is free: it may be enough when another model is unloaded."""


class ConfigFileInvalid(StartupError):
    code = "config_file_invalid"

    def __init__(self, path: Path, line: int, detail: str) -> None:
        super().__init__(f"{path}, line {line}: {detail}")
        self.path = path
        self.line = line
        self.detail = detail


class AddressUnavailable(StartupError):
    code = "address_unavailable"

    def __init__(self, host: str, port: int, detail: str) -> None:
        super().__init__(
            f"Cannot listen at {host}:{port}: {detail}. Stop the process that listens there, or choose another "
            "--host or --port (0 takes any free port)."
        )
        self.host = host
        self.port = port


class BudgetTooSmall(StartupError):
    code = "budget_too_small"

    def __init__(self, budget_bytes: int, needed_bytes: int, block_bytes: int, state_bytes: int = 0) -> None:
        and_state = f" and a recurrent state {in_units(state_bytes)}" if state_bytes else ""
        needed = in_units(needed_bytes)
        if needed == in_units(budget_bytes):  # the difference is lost in rounding
            needed += f" ({needed_bytes - budget_bytes:,} bytes more)"
        super().__init__(
            f"--kv-budget is {in_units(budget_bytes)}, but at least {needed} are needed: one block takes "
            f"{in_units(block_bytes)}{and_state}. Raise --kv-budget or lower --block-size."
        )
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.block_bytes = block_bytes
        self.state_bytes = state_bytes


class ModelError(StartupError):
    code = "model_error"


class ModelPathNotFound(ModelError):
    code = "model_path_not_found"

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(
            f"No model at {quoted(model)}: {detail}. Give a directory with config.json, a GGUF file, or a hub name."
        )
        self.model = model


class ModelFileInvalid(ModelError):
    code = "model_file_invalid"

    def __init__(
        self, model: str, file: str, detail: str, remedy: str = "Correct it, or fetch it again"
    ) -> None:
        super().__init__(f"The {file} of the model at {quoted(model)} cannot be used: {detail}. {remedy}.")
        self.model = model
        self.file = file


class ModelTooLarge(ModelError):
    code = "model_too_large"

    def __init__(self, model: str, weights_bytes: int, dtype: str, free_bytes: int, memory: str) -> None:
        super().__init__(
            f"The weights of {quoted(model)} need at least {in_units(weights_bytes)} in {dtype}, but "
            f"{in_units(free_bytes)} of the {memory} is free. Free memory, or serve with a smaller --dtype, or "
            "--quantize int8 or int4. "
            "--no-memory-check loads them all the same."
        )
        self.model = model
        self.weights_bytes = weights_bytes
        self.free_bytes = free_bytes


class ModelWeightsMissing(ModelError):
    code = "model_weights_missing"

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(f"The model at {quoted(model)} has no usable weights: {detail}.")
        self.model = model


class TokenizerUnusable(ModelError):
    code = "tokenizer_unusable"

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(
            f"The model at {quoted(model)} has no usable tokenizer: {detail}. Put its tokenizer.json and "
            "tokenizer_config.json beside config.json."
        )
        self.model = model


class ChatTemplateInvalid(ModelError):
    code = "chat_template_invalid"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(
            f"The chat template of {source} cannot be used: {detail}. Correct it, or give another with "
            "--chat-template FILE."
        )


class AdapterUnusable(ModelError):
    code = "adapter_unusable"
    http_status = 400

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"The LoRA adapter {shown(adapter)} cannot be used: {reason}.")
        self.adapter = adapter
        self.reason = reason


class ModelUnsupported(ModelError):
    code = "model_unsupported"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"Rootstock cannot run {quoted(model)}: {reason}.")
        self.model = model
        self.reason = reason


class SelfCheckFailed(ModelError):
    code = "self_check_failed"

    def __init__(self, model: str, figure: float, tolerance: float, measure: str) -> None:
        super().__init__(
            f"{quoted(model)} failed its self-check: {measure} is {figure:.3g}, at most {tolerance:.3g} is allowed. "
            "The paged forward would give wrong answers, so the model is refused; please report the architecture."
        )
        self.model = model
        self.figure = figure
        self.tolerance = tolerance
