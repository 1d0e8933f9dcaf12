"""The owner of a prompt: its tenant, and the salt of its cache namespace. Prefixes are shared only within a salt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rootstock.config import MAX_SALT_LENGTH
from rootstock.errors import InvalidParameter
from rootstock.text.limits import refuse_surrogates

_OF_CLIENT = "client:"


@dataclass(frozen=True, slots=True)
class PromptOwner:
    """The owner of a prompt: made where a request arrives, and passed on as one value."""

    tenant: str = ""
    salt: str = ""  # of the cache namespace

    @classmethod
    def of(cls, tenant: str, cache_salt: str | None = None) -> PromptOwner:
        """Makes the owner of a tenant's prompt, with the client's `cache_salt`. Raises InvalidParameter."""
        return cls(tenant, salt_of(tenant, cache_salt))

    @property
    def share(self) -> str:
        """The name whose share of memory the prompt takes: the tenant, or the salt where there are no tenants."""
        return self.tenant or self.salt


ANYBODY = PromptOwner()


def salt_of(tenant: str, salt: str | None) -> str:
    """Hashes a tenant and a client's `cache_salt` into the salt of a namespace: 64 characters, or "" without either.

    A salt that the client chose a part of begins with a mark: `is_chosen_by_client` reads it.

    Each pair has a hash of its own. The tenant comes from a key or a proxy, `cache_salt` from the client: no
    `cache_salt` leads into another tenant's namespace. The hash is cryptographic, because a client that finds two
    salts with one digest could read another client's cache. Raises InvalidParameter.
    """
    salt = salt or ""
    refuse_long(salt, "cache_salt")
    refuse_surrogates(salt, "cache_salt")
    if not tenant and not salt:
        return ""
    raw = tenant.encode()
    digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw + salt.encode()).hexdigest()
    return f"{_OF_CLIENT}{digest}" if salt else digest


def is_chosen_by_client(salt: str) -> bool:
    """Returns whether a client chose a part of the salt: none of its prompts is shared with other salts then."""
    return salt.startswith(_OF_CLIENT)


def refuse_long(text: str, name: str) -> None:
    """Refuses a salt or a tenant's name that is too long. Raises InvalidParameter."""
    if len(text) > MAX_SALT_LENGTH:
        raise InvalidParameter(name, text, f"at most {MAX_SALT_LENGTH:,} characters, not {len(text):,}")
