"""The names that a chat template reads, found in its source rather than by rendering."""

from __future__ import annotations

from dataclasses import dataclass

# Set by the renderer, or functions that it lends. No client may set them.
_PROVIDED = frozenset({"messages", "tools", "raise_exception", "strftime_now"})


@dataclass(frozen=True, slots=True)
class TemplateNames:
    variables: frozenset[str] = frozenset()  # that a client may set
    literals: frozenset[str] = frozenset()  # quoted strings, the roles that the template knows among them


def names_in(source: str) -> TemplateNames:
    """Empty for a source that is not a template: rendering it tells what is wrong."""
    from jinja2 import Environment, TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """transformers' own tag: it marks what an assistant wrote, and renders as its inside."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, loopcontrols])
    try:
        template = environment.parse(source)
        read = meta.find_undeclared_variables(template)
    except TemplateError:
        return TemplateNames()
    names = template.find_all(nodes.Name)
    # A variable that the template sets in one branch counts as undeclared in the other. It is the client's only if
    # the template asks whether it was given.
    own = {name.name for name in names if name.ctx == "store"}
    asked = {
        name.name
        for test in template.find_all((nodes.Test, nodes.Filter))
        if test.name in ("defined", "undefined", "default", "d", "none")
        for name in test.find_all(nodes.Name)
    }
    return TemplateNames(
        frozenset(read - (own - asked) - _PROVIDED - set(environment.globals)),
        frozenset(each.value for each in template.find_all(nodes.Const) if isinstance(each.value, str)),
    )
