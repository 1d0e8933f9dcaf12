"""What a request gets for a sampling parameter that it does not name."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """OpenAI's, unless the model's generation_config.json says what it was tuned for."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, directory: Path) -> SamplingDefaults:
        path = directory / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, its sampling defaults are not used: %s", path, error)
            return cls()
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known and value is not None})
