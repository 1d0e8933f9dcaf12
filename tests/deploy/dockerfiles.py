"""The instructions of a Dockerfile's stage, and values of a compose file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """The words of an instruction in its JSON form, or else those between spaces."""
        return list(json.loads(self.rest)) if self.rest.startswith("[") else self.rest.split()


def stage_of(path: Path, name: str) -> list[Instruction]:
    """Returns the instructions of a stage after its FROM. The files here continue no line."""
    found: list[Instruction] = []
    inside = False
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            inside = re.search(rf"\bAS {name}$", rest) is not None
        elif inside:
            found.append(Instruction(instruction, rest))
    return found


def interpolated(text: str, given: Mapping[str, str]) -> str:
    """Returns a value of the compose file: ${NAME:-DEFAULT} and ${NAME:?ERROR} by the variables that are given."""

    def found(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if value := given.get(name):
            return value
        if kind == ":-":
            return rest
        raise ValueError(f"compose.yml asks for {name}: {rest}")

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", found, text)
