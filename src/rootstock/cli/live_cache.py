"""Forms of `rootstock cache export` and `import` for the cache of a running server, and signatures of archives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from rootstock.cli.output import counted, progress_bar
from rootstock.errors import StartupError
from rootstock.server.declared_prompts import read_prefix_file
from rootstock.tiers.disk.archive import BUNDLE_TYPE, Unreadable, read_manifest
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.signature import BundleKey, sign, why_not_trusted
from rootstock.tiers.disk.tier import Progress
from rootstock.units import MIB, in_units

if TYPE_CHECKING:
    import httpx

From = Annotated[
    str | None, typer.Option("--from", metavar="URL", help="Export from the cache of this running server.")
]
To = Annotated[
    str | None, typer.Option("--to", metavar="URL", help="Import into the cache of this running server.")
]
PrefixFile = Annotated[
    Path | None,
    typer.Option(
        "--prefix",
        metavar="FILE",
        help="The prompt, with --from: a JSON list of messages, or the body of a request.",
    ),
]
SignKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Sign the archive with the secret key in this file.")
]
VerifyKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Refuse an archive that the key in this file has not signed."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=["ROOTSTOCK_ADMIN_KEY", "ROOTSTOCK_API_KEY"],
        metavar="KEY",
        show_default=False,
        help="Operator's key of the server.",
    ),
]
TenantName = Annotated[
    str | None,
    typer.Option("--tenant", metavar="NAME", help="Tenant whose prefix it is. Needs the server's admin key."),
]
CacheSalt = Annotated[str | None, typer.Option(metavar="SALT", help="`cache_salt` of the prefix, with --to.")]
ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="Model or LoRA adapter, with --to.")]


def export(
    url: str, prefix: Path, file: Path, key: BundleKey | None, api_key: str | None, tenant: str | None
) -> None:
    """Writes the bundle of a prompt to a file. Raises StartupError."""
    import httpx

    asked = read_prefix_file("--prefix", prefix)
    route = asked.route.replace("/v1/", "/v1/cache/export/", 1)
    temporary = file.with_name(file.name + ".part")
    headers = _headers(api_key, tenant or asked.tenant)
    try:
        with (
            server_client(url, headers) as client,
            client.stream("POST", route, json=asked.body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise StartupError(f"Nothing was exported: {_message(response)}")
            with _opened_new(temporary) as out, progress_bar("Receiving") as progress:
                for part in response.iter_bytes(MIB):
                    out.write(part)
                    progress(len(part))
        if key is not None:
            sign(temporary, key)
        tokens = _tokens_of(temporary)
        temporary.replace(file)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartupError(f"{url} can't be used: {error or type(error).__name__}.") from error
    except OSError as error:
        raise StartupError(f"{file} can't be written: {error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{counted(tokens, 'token')} written to {file}, {in_units(file.stat().st_size)}.")


def _opened_new(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)
    return os.fdopen(Files().open_new(path), "wb")  # readable by its owner only


def _tokens_of(path: Path) -> int:
    """Returns how many tokens a bundle allows to resume from. Raises StartupError and OSError."""
    with path.open("rb") as file:
        manifest = read_manifest(Files(), file.fileno(), path.stat().st_size)
    if isinstance(manifest, Unreadable):
        raise StartupError(f"Nothing was exported: the prefix was evicted meanwhile ({manifest.reason}).")
    if manifest.prefix is None:
        raise StartupError("Nothing was exported: the server sent no bundle.")
    return manifest.prefix.positions[-1]


def import_(
    url: str,
    file: Path,
    model: str | None,
    api_key: str | None,
    tenant: str | None,
    cache_salt: str | None,
) -> bool:
    """Puts a bundle into the cache of a server. Returns whether all of it is there. Raises StartupError."""
    import httpx

    headers = _headers(api_key, tenant) | {"Content-Type": BUNDLE_TYPE}
    named = {"model": model, "cache_salt": cache_salt}
    try:
        file_bytes = file.stat().st_size
        headers["Content-Length"] = str(file_bytes)
        with (
            server_client(url, headers) as client,
            progress_bar("Sending", file_bytes) as progress,
        ):
            response = client.post(
                "/v1/cache/import",
                content=_parts(file, progress),
                params={name: value for name, value in named.items() if value is not None},
            )
    except OSError as error:
        raise StartupError(f"{file} can't be read: {error}.") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartupError(f"{url} can't be used: {error or type(error).__name__}.") from error
    if response.status_code != 200:
        raise StartupError(_message(response))
    told = response.json()
    print(
        f"{told['cached_tokens']:,} of {counted(told['tokens'], 'token')} cached, "
        f"{counted(told['records'], 'record')}, {in_units(told['bytes'])}."
    )
    if told["state"] == "cached":
        return True
    print("The server has no memory for the rest: its other prefixes are worth more.")
    return False


def _parts(file: Path, progress: Progress) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while part := opened.read(MIB):
            yield part
            progress(len(part))


def signed(file: Path, key: BundleKey) -> None:
    """Signs an archive. Raises StartupError."""
    try:
        sign(file, key)
    except OSError as error:
        raise StartupError(f"{file} can't be signed: {error}.") from error


def refuse_untrusted(file: Path, key: BundleKey) -> None:
    """Raises StartupError unless the archive has a signature of the key."""
    try:
        with file.open("rb") as opened:
            reason = why_not_trusted(Files(), opened.fileno(), file.stat().st_size, key)
    except OSError as error:
        raise StartupError(f"{file} can't be imported: {error}. Nothing was changed.") from error
    if reason is not None:
        raise StartupError(f"{file} can't be imported: {reason}. Nothing was changed.")


def server_client(url: str, headers: dict[str, str], timeout_s: float | None = None) -> httpx.Client:
    """Returns a client of the server at a URL, with or without /v1."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    is_local = urlsplit(base).hostname in ("localhost", "127.0.0.1", "::1")
    # The environment's proxies cannot reach this machine's own ports.
    return httpx.Client(base_url=base, headers=headers, timeout=timeout_s, trust_env=not is_local)


def _headers(api_key: str | None, tenant: str | None) -> dict[str, str]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return headers | ({"X-Cache-Salt": tenant} if tenant else {})


def _message(response: Any) -> str:
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {response.status_code}."
    return message
