"""Errors of HTTP: routes, access, and limits of heads and bodies."""

from __future__ import annotations

from rootstock.errors.base import RequestError, quoted, shown


class RouteNotFound(RequestError):
    code = "not_found"
    http_status = 404

    def __init__(self, method: str, path: str, meant: str | None = None) -> None:
        """`meant` is the path of a route that the client probably means."""
        remedy = "GET /docs lists the routes."
        if meant is not None:
            remedy = (
                f"Use {method} {meant}. A client's base URL ends in /v1 for OpenAI's API, and has no path for "
                "Anthropic's."
            )
        super().__init__(f"There is no {method} {path} here. {remedy}")


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    http_status = 405

    def __init__(self, route: str) -> None:
        super().__init__(f"{route} is not allowed; see the Allow header.")


class WebSocketRefused(RequestError):
    code = "websocket_not_supported"
    http_status = 426

    def __init__(self) -> None:
        super().__init__(
            "The server speaks no WebSocket. Send the request by HTTP, with 'stream' for events."
        )


class HttpRefused(RequestError):
    code = "http_error"


class Unauthorized(RequestError):
    code = "invalid_api_key"
    http_status = 401

    def __init__(
        self,
        message: str = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
    ) -> None:
        super().__init__(message)


class KeysDiffer(Unauthorized):
    code = "api_keys_differ"

    def __init__(self) -> None:
        super().__init__("The headers Authorization and x-api-key hold different API keys. Send one of them.")


class AdminOnly(RequestError):
    code = "admin_only"
    http_status = 403

    def __init__(self, has_admin_key: bool) -> None:
        remedy = (
            "Send the admin key as 'Authorization: Bearer KEY'"
            if has_admin_key
            else "Serve with --admin-key KEY, and send that key as 'Authorization: Bearer KEY'"
        )
        super().__init__(f"This shows or changes data of all tenants. {remedy}.")


class KeyNotAllowed(RequestError):
    code = "key_not_allowed"
    http_status = 403

    def __init__(self, role: str) -> None:
        super().__init__(f"A key of the role {quoted(role)} may not do this. Send a key of another role.")


class ModelNotAllowed(RequestError):
    code = "model_not_allowed"
    http_status = 403

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"This key's tenant may not use model {shown(asked)}. Ask for another, or have it added to --api-keys.",
            param="model",
        )


class CsrfTokenMissing(RequestError):
    code = "csrf_token_missing"
    http_status = 403

    def __init__(self) -> None:
        super().__init__(
            "A browser's session may change things only with its token in the header X-CSRF-Token. Reload the page."
        )


class BodyTooLarge(RequestError):
    code = "body_too_large"
    http_status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The body of the request has more than {limit_bytes:,} bytes (--max-body). Send less at once."
        )


class ContentTypeNotJson(RequestError):
    code = "unsupported_media_type"
    http_status = 415

    def __init__(self, header: str, value: str) -> None:
        super().__init__(
            f"The request's {header} is {shown(value)}. Send the body as 'Content-Type: application/json', "
            "in UTF-8 and without a Content-Encoding."
        )


class HostNotAllowed(RequestError):
    code = "host_not_allowed"
    http_status = 403

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This server is not known as {shown(host)}. Address it by localhost or by its IP address, or "
            "serve with --allowed-hosts NAME."
        )


class OriginNotAllowed(RequestError):
    code = "origin_not_allowed"
    http_status = 403

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Web pages of {shown(origin)} may not use this server. Serve with --allowed-origins to let them."
        )


class MalformedHttp(RequestError):
    code = "malformed_http"

    def __init__(self, detail: str) -> None:
        super().__init__(f"The request is not valid HTTP: {detail}.")


class RequestTimeout(RequestError):
    code = "request_timeout"
    http_status = 408

    def __init__(self, detail: str) -> None:
        super().__init__(f"The request came too slowly: {detail}. Send it again.")


class UrlTooLong(RequestError):
    code = "url_too_long"
    http_status = 414

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The URL of the request has more than {limit_bytes:,} bytes.")


class HeadTooLarge(RequestError):
    code = "head_too_large"
    http_status = 431

    def __init__(self, limit_bytes: int, limit_fields: int) -> None:
        super().__init__(
            f"The request has more than {limit_fields} header fields, or more than {limit_bytes:,} bytes of them "
            "or of chunk extensions and trailers."
        )
