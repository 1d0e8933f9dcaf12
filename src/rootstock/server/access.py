"""API keys and tenants: who sends a request, and in whose namespace it is answered."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request

from rootstock.config import ServerConfig
from rootstock.engine.prompts.salt import refuse_long
from rootstock.errors import AdminOnly, InvalidParameter

SALT_HEADER = "X-Cache-Salt"
_STATE = "rootstock_caller"  # where the guard leaves it in the request's state


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, by its key."""

    tenant: str = ""  # of the key; "": the key is bound to none, and X-Cache-Salt says which
    has_admin_key: bool = False  # it was sent
    is_operator: bool = False  # may ask for what tells of all tenants, unless a header names one


class Keys:
    """The keys of a server. Comparing costs the same for a right key and for any wrong one."""

    def __init__(self, config: ServerConfig) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        for key, tenant in config.tenant_keys.items():
            self._callers[self._digest(key.encode())] = Caller(tenant)
        # Without an admin key, a client that is bound to no tenant is the operator.
        unbound = Caller(is_operator=config.admin_key is None)
        if config.api_key is not None:
            self._callers[self._digest(config.api_key.encode())] = unbound
        self._anonymous = None if self._callers else unbound
        if config.admin_key is not None:
            admin = Caller(has_admin_key=True, is_operator=True)
            self._callers[self._digest(config.admin_key.encode())] = admin

    def caller(self, authorization: bytes) -> Caller | None:
        """Whose key an Authorization header holds; None: a key is asked for, and this is none."""
        scheme, _, key = authorization.partition(b" ")
        found = self._callers.get(self._digest(key.strip())) if scheme.lower() == b"bearer" else None
        return found or self._anonymous

    def _digest(self, key: bytes) -> bytes:
        # Under a secret of this process: the time that a lookup takes says nothing about the keys.
        return hmac.digest(self._secret, key, "sha256")


def remember_caller(state: dict[str, object], caller: Caller) -> None:
    """For the guard, which has read the key; `state` is the ASGI scope's."""
    state[_STATE] = caller


def caller_of(request: Request) -> Caller:
    """Without a key, at /health, nobody in particular."""
    caller = getattr(request.state, _STATE, None)
    return caller if isinstance(caller, Caller) else Caller()


async def tenant_of(
    request: Request,
    _named: Annotated[
        str,
        Header(
            alias=SALT_HEADER,
            description="the tenant, set by a proxy that knows who asks; the tenant of an API key overrides it",
        ),
    ] = "",
) -> str:
    """The tenant that a request is sent for. A coroutine, so that no thread is needed for it."""
    return _tenant_of(request)


def _tenant_of(request: Request) -> str:
    """The tenant of the key, or else the one that X-Cache-Salt names; "": none. Raises InvalidParameter."""
    named = request.headers.getlist(SALT_HEADER)
    if len(named) > 1:
        # A proxy that adds its header to the client's own would leave the choice to the client.
        raise InvalidParameter(SALT_HEADER, named, "sent once: a proxy must replace what a client sends")
    tenant = caller_of(request).tenant or (named[0] if named else "")
    refuse_long(tenant, SALT_HEADER)
    return tenant


Tenant = Annotated[str, Depends(tenant_of)]


def is_operator(request: Request) -> bool:
    """Whether the sender may be told of all tenants: it has the admin key; or none is asked for, its key is bound to
    no tenant, and no header names one."""
    caller = caller_of(request)
    return caller.has_admin_key or (caller.is_operator and not any(request.headers.getlist(SALT_HEADER)))


def names_tenant(request: Request) -> bool:
    """Whether the request is sent for one tenant, without the admin key."""
    return not caller_of(request).has_admin_key and bool(_tenant_of(request))


def refuse_unless(allowed: bool, config: ServerConfig) -> None:
    if not allowed:
        raise AdminOnly(config.admin_key is not None)
