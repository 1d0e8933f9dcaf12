"""`rootstock cache pin`, `release` and `pins`: pinned prefixes of a running server."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from rootstock.cli import options
from rootstock.cli.output import Column, print_table
from rootstock.cli.server_client import server_client
from rootstock.errors import InvalidOption, StartupError
from rootstock.options import read_bounded
from rootstock.units import MIB, in_units

MAX_FILE_BYTES = 16 * MIB
ANSWERS_WITHIN_S = 120.0  # a long prompt is tokenized first

Json = dict[str, Any]
Url = Annotated[str, typer.Option(metavar="URL", help="URL of the server.")]
Key = Annotated[
    str | None,
    typer.Option(envvar=f"{options.ENV_PREFIX}_API_KEY", metavar="KEY", show_default=False, help="API key."),
]
_LOCAL = "http://127.0.0.1:8000"


class Form(StrEnum):
    """The API whose request a file holds."""

    chat = "chat"
    completions = "completions"
    messages = "messages"
    responses = "responses"


_PATHS = {
    Form.chat: "/v1/cache/pin/chat/completions",
    Form.completions: "/v1/cache/pin/completions",
    Form.messages: "/v1/cache/pin/messages",
    Form.responses: "/v1/cache/pin/responses",
}


def pin(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON of a request, or of its messages or prompt.")
    ],
    url: Url = _LOCAL,
    api_key: Key = None,
    form: Annotated[Form, typer.Option("--api", help="API whose request FILE holds.")] = Form.chat,
) -> None:
    """Keep the cached part of a prompt in a server's memory until it is released."""
    text = read_bounded("FILE", file, MAX_FILE_BYTES)
    try:
        body = json.loads(text)
    except ValueError as error:
        raise InvalidOption("FILE", str(file), f"a file of JSON: {error}") from error
    if isinstance(body, list):
        body = {"input" if form is Form.responses else "messages": body}
    pinned = _ask(url, api_key, "POST", _PATHS[form], body)
    told = f"{pinned['tokens']:,} of {pinned['asked_tokens']:,} tokens, {in_units(pinned['bytes'])}"
    print(f"{pinned['id']}\t{told}")


def release(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of a pin, as `rootstock cache pins` lists it.")],
    url: Url = _LOCAL,
    api_key: Key = None,
) -> None:
    """Release a pinned prefix of a server. It stays cached like any other."""
    _ask(url, api_key, "POST", "/v1/cache/release", {"id": id})
    print(f"{id} released.")


def pins(
    url: Url = _LOCAL,
    api_key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the pinned prefixes of a server."""
    found: list[Json] = _ask(url, api_key, "GET", "/v1/cache/pins", None)["pins"]
    if as_json:
        print(json.dumps(found))
        return
    columns: list[Column[Any]] = [
        Column("id", "id", lambda pinned: pinned["id"]),
        Column("tokens", "tokens", lambda pinned: pinned["tokens"], lambda n: f"{n:,}", numeric=True),
        Column("size", "bytes", lambda pinned: pinned["bytes"], in_units, numeric=True),
        Column("tenant", "tenant", lambda pinned: pinned["tenant"] or "-"),
    ]
    print_table(columns, found)


def _ask(url: str, key: str | None, method: str, path: str, body: Any) -> Any:
    """Sends a request and returns its answer. Raises StartupError."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https"):
        raise InvalidOption("--url", url, f"the URL of a server, such as {_LOCAL}")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with server_client(url, headers, ANSWERS_WITHIN_S) as client:
            answer = client.request(method, path, json=body)
        told = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StartupError(f"No server answers at {base}{path} ({type(error).__name__}).") from error
    if answer.status_code != 200:
        refusal = told.get("error") if isinstance(told, dict) else None
        reason = refusal["message"] if isinstance(refusal, dict) and "message" in refusal else told
        raise StartupError(f"The server refuses it (status {answer.status_code}): {reason}")
    return told
