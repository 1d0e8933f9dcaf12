"""Parameters of commands, made from the table of options and grouped into panels of `--help`.

A value comes from the command line, else from the environment, else from the file of `--config`, else it is the
default. A command that is `configured` gets the configuration that its options make.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rootstock.cli.config_file import PLACES, SECTION, load_config
from rootstock.errors import InvalidOption
from rootstock.logs import announce
from rootstock.option_table import FIELDS, OPTIONS, VLLM_NAMES, configuration_of
from rootstock.options import MODEL, Option

ENV_PREFIX = "ROOTSTOCK"


class Command(TyperCommand):
    """A command whose errors name the environment variable or the line of the file that set a wrong option."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except InvalidOption as error:
            for parameter in self.params:
                if error.option in parameter.opts and (place := _place_of(ctx, parameter)):
                    raise InvalidOption(f"{error.option} ({place})", error.value, error.allowed) from error
            raise


def _place_of(ctx: typer.Context, parameter: Any) -> str | None:
    """Returns the environment variable, or the file and line, that set the value. None: neither did."""
    source = _source_of(ctx, parameter.name)
    if source == "DEFAULT_MAP":
        return str(ctx.meta[PLACES][parameter.name])
    if source != "ENVIRONMENT":
        return None
    names = parameter.envvar or f"{ctx.auto_envvar_prefix}_{parameter.name.upper()}"
    if not isinstance(names, str):  # the option has had another name
        names = next(name for name in names if os.environ.get(name))
    return f"environment variable {names}"


def _source_of(ctx: typer.Context, parameter: str) -> str:
    source = ctx.get_parameter_source(parameter)
    return "DEFAULT" if source is None else source.name


def parameter(name: str, *, hidden: bool = False) -> Any:
    """Makes typer's parameter of an option, also set by ROOTSTOCK_<NAME>."""
    option = _option(name)
    forms = [form for form in (option.name, option.negative) if form]
    theirs = ", ".join(f"--{vllm}" for vllm, ours in VLLM_NAMES.items() if ours in forms)
    variables = [f"{ENV_PREFIX}_{each.upper().replace('-', '_')}" for each in (name, *option.earlier)]
    return typer.Option(
        "/".join(f"--{form}" for form in forms),
        help=f"{option.help} vLLM: {theirs}." if theirs else option.help,
        rich_help_panel=option.panel,
        envvar=variables if len(variables) > 1 else variables[0],
        allow_from_autoenv=False,
        metavar=option.metavar,
        show_default=False if option.secret else option.unset or True,
        hidden=hidden,
    )


def _option(name: str) -> Option:
    return OPTIONS[FIELDS[name.replace("-", "_")]]


def configured(*names: str, hidden: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds options to a command, whose parameter `config` is then the configuration that they make.

    Without names it adds all options, and those hidden that have their place in the section `advanced`. `hidden`: the
    help shows none of them.
    """
    taken = {name.replace("-", "_"): _option(name) for name in names or FIELDS}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.written_default,
                annotation=Annotated[
                    option.form.type | None if option.written_default is None else option.form.type,
                    parameter(option.name, hidden=hidden or (option.advanced and not names)),
                ],
            )
            for name, option in taken.items()
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            texts = {name: given.pop(name) for name in taken}
            values = {
                FIELDS[name]: option.form.parse(texts[name], option.flag)
                for name, option in taken.items()
                if texts[name] is not None
            }
            command(config=configuration_of(given.get("model") or "", values), **given)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each for each in own if each.name != "config"] + added
        )
        return run

    return decorate


def as_arguments(ctx: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Returns the options that were given, as a command line has them: "--name" → text."""
    return {
        f"--{name}": str(ctx.params[name.replace("-", "_")])
        for name in names
        if _source_of(ctx, name.replace("-", "_")) != "DEFAULT"
    }


def announce_misplaced(ctx: typer.Context) -> None:
    """Names the place of advanced options that were given elsewhere, which is accepted, in one line."""
    in_section = ctx.meta.get(SECTION, ())
    found = [
        f"--{OPTIONS[field].name}"
        for name, field in FIELDS.items()
        if OPTIONS[field].advanced and name not in in_section and _source_of(ctx, name) != "DEFAULT"
    ]
    if found:
        announce(
            f"the place of {', '.join(found)} is the section 'advanced' of the file of --config (docs/cli.md)"
        )


_MODEL_HELP = "Model directory with config.json, GGUF file, or name on the Hugging Face Hub."
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", envvar=f"{ENV_PREFIX}_MODEL", help=_MODEL_HELP)]
ServedModelPath = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", envvar=f"{ENV_PREFIX}_MODEL", help=_MODEL_HELP, show_default=False),
]
MoreModels = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Further models. They share --kv-budget. Requests name one of them.",
        show_default=False,
    ),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(
        "--models",
        metavar="FILE",
        envvar=f"{ENV_PREFIX}_MODELS",
        allow_from_autoenv=False,
        rich_help_panel=MODEL,
        help="YAML file of models with options of their own, such as 'small: {model: DIRECTORY, load: demand}'.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=f"{ENV_PREFIX}_CONFIG",
        allow_from_autoenv=False,
        is_eager=True,
        callback=load_config,
        help="YAML file of options, such as 'max-batch: 32', and of further ones in its section 'advanced' "
        "(docs/cli.md). The command line and the environment override it.",
    ),
]
