"""The sender of a request, as the code that answers it needs to know it."""

from __future__ import annotations

from dataclasses import dataclass

from rootstock.server.wire.hints.headers import NO_HEAD, HeaderHints
from rootstock.text.prompts.tenant_salt import PromptOwner, salt_of


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request: made where the request arrives, and passed on as one value."""

    tenant: str  # of the key, or named by a proxy; "": the server has no tenants
    head: HeaderHints = NO_HEAD  # hints in the head of the request

    def owner(self, cache_salt: str | None) -> PromptOwner:
        """Returns the owner of a prompt that is sent with a `cache_salt`. Raises InvalidParameter."""
        return PromptOwner.of(self.tenant, cache_salt)

    @property
    def salt(self) -> str:
        """The salt of what the sender owns without a `cache_salt`."""
        return salt_of(self.tenant, None)
