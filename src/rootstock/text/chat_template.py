"""Names that a chat template reads, found in its source rather than by rendering."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Set by the renderer: no client may set them.
_PROVIDED = frozenset({"messages", "tools", "raise_exception", "strftime_now"})
# Methods by which a template looks for text in a message.
_SEARCHES = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index"}
_SEARCHES |= {"count", "replace", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}


@dataclass(frozen=True, slots=True)
class TemplateNames:
    variables: frozenset[str] = frozenset()  # that a client may set
    literals: frozenset[str] = frozenset()  # quoted strings, the roles that the template knows among them
    removed: frozenset[str] = frozenset()  # literals that it may replace: the text around them then joins
    searched: frozenset[str] = frozenset()  # literals that it searches for in messages: the end of reasoning
    attributes: frozenset[str] = frozenset()  # fields of messages, tools and other objects that it reads


def names_in(source: str) -> TemplateNames:
    """Finds the names in a template's source. Empty for a broken template: rendering reports the error."""
    from jinja2 import Environment, TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        """The `generation` tag of transformers: marks the assistant's text and renders as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[GenerationTag, loopcontrols])
    try:
        template = environment.parse(source)
        read = meta.find_undeclared_variables(template)
    except (TemplateError, RecursionError):
        return TemplateNames()
    names = list(template.find_all(nodes.Name))
    # A variable that the template sets in one branch counts as undeclared in the other. It is the client's only if
    # the template asks whether it was given.
    own = {name.name for name in names if name.ctx == "store"}
    asked = {
        name.name
        for test in template.find_all((nodes.Test, nodes.Filter))
        if test.name in ("defined", "undefined", "default", "d", "none")
        for name in test.find_all(nodes.Name)
    }
    for assigned in template.find_all(nodes.Assign):  # {% set thinking = thinking or false %}
        if isinstance(assigned.target, nodes.Name):
            read_there = {name.name for name in assigned.find_all(nodes.Name) if name.ctx == "load"}
            asked |= {assigned.target.name} & read_there
    searched: list[nodes.Node] = []
    removed: list[nodes.Node] = []
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            searched += call.args
            removed += call.args[:1] if call.node.attr == "replace" else []
    for filtered in template.find_all(nodes.Filter):
        if filtered.name == "replace":
            searched += filtered.args
            removed += filtered.args[:1]
    for compared in template.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compared.ops):
            searched.append(compared.expr)

    def texts(expressions: Iterable[nodes.Node]) -> frozenset[str]:
        constants = (each.value for each in expressions if isinstance(each, nodes.Const))
        return frozenset(value for value in constants if isinstance(value, str))

    return TemplateNames(
        frozenset(read - (own - asked) - _PROVIDED - set(environment.globals)),
        texts(template.find_all(nodes.Const)),
        texts(removed) - {""},
        texts(searched),
        frozenset(each.attr for each in template.find_all(nodes.Getattr))
        | texts(each.arg for each in template.find_all(nodes.Getitem)),
    )
