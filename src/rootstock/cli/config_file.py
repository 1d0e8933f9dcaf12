"""`--config`: options from a YAML file, checked against the options of the command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from rootstock.errors import ConfigFileInvalid
from rootstock.option_table import FIELDS, OPTIONS
from rootstock.options import NAMES, read_bounded

MAX_CONFIG_BYTES = 1 << 16
ADVANCED = "advanced"  # the section of options that few need
# Keys in a context's `meta`: parameter name → "FILE, line N", and the names of parameters that the section sets.
PLACES, SECTION = "rootstock.places", "rootstock.section"


def load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the options in the file the defaults of the command. Raises InvalidOption and ConfigFileInvalid.

    A callback of `--config`: it runs before other options are read, so that the command line and the environment
    override the file."""
    if path is not None:
        values, places, in_section = dict[str, str | list[str]](), dict[str, str](), set[str]()
        known, our_name = _options_of(ctx), ctx.token_normalize_func or str
        for key, node, is_in_section in _all_entries(path):
            line: int = key.start_mark.line + 1
            name = our_name(key.value.replace("_", "-"))
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else " See `rootstock serve --help`."
                raise ConfigFileInvalid(path, line, f"there is no option {key.value!r}.{hint}")
            parameter, negated = known[name]
            if parameter.name in values:
                raise ConfigFileInvalid(path, line, f"{key.value!r} is set twice.")
            if is_in_section and not parameter.hidden:
                raise ConfigFileInvalid(
                    path, line, f"{key.value!r} is written outside the section {ADVANCED!r}."
                )
            values[parameter.name] = _value(ctx, path, key.value, node, parameter, negated)
            places[parameter.name] = f"{path}, line {line}"
            if is_in_section:
                in_section.add(parameter.name)
        ctx.default_map = values
        ctx.meta[PLACES], ctx.meta[SECTION] = places, in_section
    return path


def _all_entries(path: Path) -> Iterator[tuple[Any, Any, bool]]:
    """Yields the nodes of keys and values, and whether they are in the section of advanced options."""
    for key, node in entries_of(read_bounded("--config", path, MAX_CONFIG_BYTES), path):
        if key.value == ADVANCED:
            yield from ((*each, True) for each in pairs_of(node, path))
        else:
            yield key, node, False


def _options_of(ctx: typer.Context) -> Mapping[str, tuple[Any, bool]]:
    """Return name → parameter, and whether the name is its negative form. Without --config and --help."""
    return {
        form.lstrip("-"): (parameter, form in parameter.secondary_opts)
        for parameter in ctx.command.params
        if not parameter.is_eager
        for form in (*parameter.opts, *parameter.secondary_opts)
    }


def entries_of(text: str, path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of keys and values. No object is made of them: a value is its text in the file."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # The error's own text quotes the line, which may hold a key.
        problem = getattr(error, "problem", None) or "a character that is not allowed"
        raise ConfigFileInvalid(path, mark.line + 1 if mark else 1, f"not YAML: {problem}.") from None
    except RecursionError:
        raise ConfigFileInvalid(path, 1, "values are nested too deeply.") from None
    if root is not None:  # an empty file
        yield from pairs_of(root, path)


def pairs_of(root: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    """Yields the nodes of keys and values of a mapping. Raises ConfigFileInvalid."""
    import yaml

    if not isinstance(root, yaml.MappingNode):
        raise ConfigFileInvalid(path, root.start_mark.line + 1, "not a mapping of options to values.")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigFileInvalid(path, key.start_mark.line + 1, "not the name of an option.")
        yield key, value


def _value(
    ctx: typer.Context, path: Path, key: str, node: Any, parameter: Any, negated: bool
) -> str | list[str]:
    """Return the value in the form of the command line, checked for the type of the option."""
    import yaml

    line = node.start_mark.line + 1
    if parameter.multiple or parameter.nargs == -1:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return [scalar_of(path, key, item) for item in items]
    if isinstance(node, yaml.SequenceNode) and _is_a_list_of_names(parameter.name):
        return json.dumps([scalar_of(path, key, item) for item in node.value])
    value = scalar_of(path, key, node)
    try:
        parsed = parameter.process_value(ctx, value)
    except typer.BadParameter as error:
        raise ConfigFileInvalid(path, line, f"{key} is {value!r}: {error.message.rstrip('.')}.") from None
    return str(not parsed) if negated else value


def _is_a_list_of_names(parameter: str) -> bool:
    return parameter in FIELDS and OPTIONS[FIELDS[parameter]].form is NAMES


def scalar_of(path: Path, key: str, node: Any) -> str:
    import yaml

    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode):
        kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
        raise ConfigFileInvalid(path, line, f"{key} must be a single value, not a {kind}.")
    if node.tag != "tag:yaml.org,2002:str":
        raise ConfigFileInvalid(path, line, f"{key} has the tag {node.tag!r}: tags are not supported.")
    if node.style is None and node.value in ("", "~", "null"):
        raise ConfigFileInvalid(path, line, f"{key} has no value.")
    return str(node.value)
