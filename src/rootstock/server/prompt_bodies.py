"""Bodies of prompts on routes that change the cache: a misspelled field or parameter is refused.

The route that pins or warms a prompt takes the body of the route that answers it, with all fields that clients send
there. A misspelled field would be ignored like fields of the answer. Another prefix would then be pinned, or the
prefix under another salt.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from difflib import get_close_matches
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant

from rootstock.errors import Unsupported, shown
from rootstock.server.anthropic.schema import REFUSED as MESSAGES_REFUSED
from rootstock.server.anthropic.schema import CountTokensRequest, MessagesRequest
from rootstock.server.fields import Wire
from rootstock.server.openai.schema import (
    IGNORED,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    ExplainRequest,
    WarmRequest,
)
from rootstock.server.request_bodies import BoundedJsonRoute
from rootstock.text.constraints.openai_fields import CONSTRAINT_FIELDS
from rootstock.text.limits import MAX_LABEL_CHARS

MAX_UNKNOWN_FIELDS = 16
_ALIKE = 0.75  # two letters of four may be swapped

_OPENAI = frozenset(
    {
        *ChatCompletionRequest.model_fields,
        *CompletionRequest.model_fields,
        *REFUSED,
        *IGNORED,
        *CONSTRAINT_FIELDS,
    }
)
_KNOWN: Mapping[type[Wire], frozenset[str]] = {
    ExplainRequest: _OPENAI,
    WarmRequest: _OPENAI,
    CountTokensRequest: frozenset({*MessagesRequest.model_fields, *MESSAGES_REFUSED}),
}


def refuse_misspelled(body: Wire) -> None:
    """Refuses a field that no table knows and that looks like one of the body's own, or very many unknown ones.

    Raises Unsupported.
    """
    known = _KNOWN.get(type(body), frozenset())
    unknown = [str(name) for name in body.model_extra or () if name not in known]
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        raise Unsupported(
            shown(unknown[0]), f"Nor are others: at most {MAX_UNKNOWN_FIELDS} unknown fields are ignored."
        )
    for name in unknown:
        meant = get_close_matches(name[:MAX_LABEL_CHARS], type(body).model_fields, 1, _ALIKE)
        if meant:
            raise Unsupported(name[:MAX_LABEL_CHARS], f"Send {meant[0]!r} if that is meant, or leave it out.")


class StateRoute(BoundedJsonRoute):
    """A route that shows or changes the server's state, with a JSON body or none.

    It refuses parameters of the query that it does not declare.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _parameters_of(self.dependant)

        async def checked(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    listed = ", ".join(sorted(known)) or "none"
                    raise Unsupported(name[:MAX_LABEL_CHARS], f"Parameters of this route: {listed}.")
            return await handle(request)

        return checked


def _parameters_of(dependant: Dependant) -> set[str]:
    """Returns the names of the parameters of a query that a route and its dependencies declare."""
    inner = (name for each in dependant.dependencies for name in _parameters_of(each))
    return {*(field.alias for field in dependant.query_params), *inner}
