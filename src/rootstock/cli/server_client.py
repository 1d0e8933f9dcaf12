"""HTTP client of the commands that use a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rootstock.errors import StartupError

if TYPE_CHECKING:
    import httpx


def server_client(
    url: str, headers: dict[str, str], timeout_s: float | httpx.Timeout | None = None
) -> httpx.Client:
    """Returns a client of the server at a URL, with or without /v1. Raises StartupError."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    try:
        host = urlsplit(base).hostname
        httpx.URL(base)
    except (httpx.InvalidURL, ValueError) as error:
        raise StartupError(f"The URL is no URL of a server ({error}).") from error
    is_local = host in ("localhost", "127.0.0.1", "::1")
    # The environment's proxies cannot reach this machine's own ports.
    return httpx.Client(base_url=base, headers=headers, timeout=timeout_s, trust_env=not is_local)
