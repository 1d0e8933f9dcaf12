"""Default values of the sampling parameters that a request does not name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rootstock.errors import ModelFileInvalid
from rootstock.runtime.model_files import GENERATION_CONFIG, read_json

Rule = tuple[Callable[[float], bool], str]

_LARGEST = 1e9  # also refuses infinity, NaN and integers that no float can hold

# The same limits as for the fields of a request.
_RULES: dict[str, Rule] = {
    "temperature": (lambda value: value >= 0, "a number, 0 or more"),
    "top_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "top_k": (lambda value: value >= -1 and value == int(value), "an integer, -1 or more"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: value > 0, "a number above 0"),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of OpenAI's API, or the values that the model's generation_config.json recommends."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def chosen(cls, choice: str, model: str, directory: Path) -> SamplingDefaults:
        """Returns the defaults that --sampling-defaults asks for: model or openai. Raises ModelFileInvalid."""
        return cls.of_model(model, directory) if choice == "model" else cls()

    @classmethod
    def of_model(cls, model: str, directory: Path) -> SamplingDefaults:
        """Reads generation_config.json, if there is one. Raises ModelFileInvalid."""
        if not (directory / GENERATION_CONFIG).exists():
            return cls()
        config = read_json(model, directory, GENERATION_CONFIG)
        given = {name: config[name] for name in _RULES if config.get(name) is not None}
        for name, value in given.items():
            holds, allowed = _RULES[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not abs(value) <= _LARGEST or not holds(value):
                raise ModelFileInvalid(
                    model,
                    GENERATION_CONFIG,
                    f"{name} is {str(value)[:80]!r}, but must be {allowed}",
                    "Correct it, or serve with --sampling-defaults openai",
                )
        return cls(**{name: int(value) if name == "top_k" else value for name, value in given.items()})
