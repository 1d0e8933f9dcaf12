"""Declarations of options: one call of `option`, as a field of the configuration, says all about an option.

`rootstock.config` has the fields. The command line, the environment, the files of `--config` and `--models`, the
keywords of `LLM`, the checks of values and docs/cli.md are read from them, by way of `rootstock.option_table`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_origin

from rootstock.errors import InvalidOption
from rootstock.units import GIB, KIB, MIB, TIB, in_units

MAX_TEMPLATE_BYTES = MIB
_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_UNITS |= {"K": KIB, "M": MIB, "G": GIB, "T": TIB, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

T = TypeVar("T")

# The panels of `--help`, in their order.
MODEL, CACHE, RETENTION, TIERS = "Model", "Cache", "Hints and idle work", "Tiers"
SCHEDULING, SAMPLING, SERVER = "Scheduling", "Sampling and speculation", "Server"
OBSERVATION, FLEET = "Dashboard, metrics, traces and logs", "Several servers"
PANELS = (MODEL, CACHE, RETENTION, TIERS, SCHEDULING, SAMPLING, SERVER, OBSERVATION, FLEET)

# ---------------------------------------------------------------------------------------------- forms of values


def parse_bytes(text: str, option: str = "--kv-budget") -> int:
    """Parses a size such as "4GiB", "512M" or "1500000" to bytes."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() if found else "?"
    if found is None or unit not in _UNITS:
        raise InvalidOption(option, text, "a size such as 4GiB, 512MiB or 1500000")
    return int(float(found[1]) * _UNITS[unit])


def parse_seconds(text: str, option: str) -> float:
    """Parses a time such as "100ms", "2s" or "10m" to seconds."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(ms|s|m|h)\s*", text)
    if found is None:
        raise InvalidOption(option, text, "a time with its unit, such as 100ms, 0.1s or 10m")
    return float(found[1]) * _SECONDS[found[2]]


def parse_names(text: str, option: str) -> tuple[str, ...]:
    """Parses a list of names: 'a,b', or '["a", "b"]' as vLLM writes it."""
    if not text.strip().startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidOption(option, text, 'names such as a,b or ["a", "b"]')
    return tuple(names)


def parse_budget(text: str, option: str = "--kv-budget") -> int | None:
    """Parses "auto" (None), or a size."""
    return None if text == "auto" else parse_bytes(text, option)


def parse_draft_tokens(text: str, option: str = "--speculate") -> int | None:
    """Parses "auto" (None), "off" (0), or a number."""
    if text == "auto":
        return None
    if text == "off":
        return 0
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise InvalidOption(option, text, "auto, off, or the largest number of draft tokens")
    return int(text)


def parse_memory_limit(text: str, option: str = "--memory-limit") -> int | None:
    """Parses "auto" (None), "off" (0), or a size."""
    if text == "auto":
        return None
    if text == "off":
        return 0
    limit = parse_bytes(text, option)
    if not limit:
        raise InvalidOption(option, text, "auto, off, or a size such as 24GiB")
    return limit


def read_bounded(option: str, path: Path, most_bytes: int) -> str:
    """Returns the text of a small file. Raises InvalidOption if it can't be read or is larger than `most_bytes`."""
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise InvalidOption(option, str(path), f"a file of at most {in_units(most_bytes)}")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(option, str(path), f"a file that can be read ({error})") from error


def _bytes_as_text(size: int) -> str:
    """Writes a size as `parse_bytes` reads it."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size and not size % _UNITS[unit.upper()]), "")
    return f"{size // _UNITS[unit.upper()]}{unit}"


def _as_it_is(value: Any, _option: str) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class ValueForm:
    """How the command line, the environment and files write a value. Each field is a function or a type."""

    type: Any  # of the value as the command line's parser returns it; a list: the option may be repeated
    parse: Callable[[Any, str], Any] = _as_it_is  # from that value and the option's name in errors
    written: Callable[[Any], Any] = lambda value: value  # from a field's value: how it is written
    none: Any = None  # how None is written
    of_text: Callable[[str, str], Any] = _as_it_is  # from the text in a file of models to `type`


def _whole(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidOption(option, text, "a whole number")
    return int(text)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidOption(option, text, "a number such as 2") from None


def _switch(text: str, option: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off", "yes", "no"):
        raise InvalidOption(option, text, "true or false")
    return text.lower() in ("true", "on", "yes")


TEXT = ValueForm(str)
WHOLE = ValueForm(int, of_text=_whole)
NUMBER = ValueForm(float, of_text=_number)
SWITCH = ValueForm(bool, of_text=_switch)
FILE = ValueForm(Path, of_text=lambda text, _: Path(text))
TEMPLATE = ValueForm(
    Path,
    lambda path, option: read_bounded(option, path, MAX_TEMPLATE_BYTES),
    of_text=lambda text, _: Path(text),
)
SIZE = ValueForm(str, parse_bytes, _bytes_as_text)
BUDGET = ValueForm(str, parse_budget, _bytes_as_text, none="auto")
MEMORY_LIMIT = ValueForm(str, parse_memory_limit, _bytes_as_text, none="auto")
TIME = ValueForm(str, parse_seconds, lambda seconds: f"{seconds:g}s")
NAMES = ValueForm(str, parse_names, ",".join)
NAMES_EACH = ValueForm(
    list[str], lambda texts, option: tuple(name for text in texts for name in parse_names(text, option))
)
FILES = ValueForm(list[Path], lambda paths, _: tuple(paths))
DRAFT_TOKENS = ValueForm(str, parse_draft_tokens, lambda tokens: str(tokens or "off"), none="auto")
SIZES = (SIZE, BUDGET, MEMORY_LIMIT)

# ------------------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True)
class Option:
    """A declared option. It sets the field of the configuration that holds the declaration."""

    name: str  # on the command line, with dashes before it, and in files; the variable is ROOTSTOCK_<NAME>
    panel: str  # of --help; "": only the library has the option
    help: str
    form: ValueForm
    choices: Sequence[str] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None  # the value is larger
    allowed: str = ""  # the range in words, where its numbers do not say it
    default: Any = None  # of `serve`, as the field's value
    unset: str = ""  # what a value of None means, in the list of options
    metavar: str | None = None
    off: str = ""  # the negative form's name; "": no-<name> if the option has one
    two_forms: bool = False  # --name and --no-name
    secret: bool = False  # errors and lists never show the value
    vllm: str = ""  # vLLM's name of it
    vllm_off: str = ""  # vLLM's name of its negative form
    earlier: Sequence[str] = ()  # names that it has had
    advanced: bool = False  # its place is the section `advanced` of the file of --config
    per_model: bool = False  # the file of --models sets it for one model
    library: bool = True  # `LLM` has it, if it has the class of the configuration

    @property
    def flag(self) -> str:
        """The name in error messages."""
        return f"--{self.name}" if self.panel else self.name

    @property
    def negative(self) -> str:
        return (self.off or f"no-{self.name}") if self.two_forms or self.off else ""

    @property
    def written_default(self) -> Any:
        """The default as the command line writes it; None: no value, as for options that may be repeated."""
        if self.default is None:
            return self.form.none
        return None if get_origin(self.form.type) is list else self.form.written(self.default)

    def check(self, value: Any, name: str) -> None:
        """Raises InvalidOption for a value outside the choices or the range. `name` is the option's in the error."""
        if self.choices:
            if value not in self.choices:
                raise InvalidOption(name, value, " | ".join(self.choices))
            return
        if value is None:
            return
        above, least, most = self.above, self.least, self.most
        # Written so that "not a number" is outside.
        inside = (above is None or value > above) and (least is None or value >= least)
        if inside and (most is None or value <= most):
            return
        if self.allowed:
            words = self.allowed
        elif above is not None:
            words = f"more than {above:g}" + ("" if most is None else f", and at most {most:g}")
        elif most is not None:
            words = f"from {least:g} to {most:,g}"
        else:
            words = f"at least {self.form.written(least)}"
        raise InvalidOption(name, self.form.written(value) if self.form is TIME else value, words)


_KEY = "option"


def option(
    default: T,
    name: str,
    panel: str,
    help: str,
    form: ValueForm = TEXT,
    *,
    served_default: T | None = None,
    secret: bool = False,
    **more: Any,
) -> T:
    """Declares a field and its option. `served_default` is the default of `serve`, where it differs."""
    served = default if served_default is None else served_default
    declared = Option(name, panel, help, form, default=served, secret=secret, **more)
    return field(default=default, repr=not secret, metadata={_KEY: declared})


def declared_options(config: type) -> dict[str, Option]:
    """Returns the options of a class of the configuration, by their fields."""
    return {each.name: each.metadata[_KEY] for each in fields(config) if _KEY in each.metadata}


def check_options(config: Any) -> None:
    """Raises InvalidOption for a value that its option does not allow."""
    for name, declared in declared_options(type(config)).items():
        declared.check(getattr(config, name), declared.flag)
