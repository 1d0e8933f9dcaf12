"""Fingerprints of requests: digests by which a later request is compared with an earlier one.

A client that asks why its prompt was not found in the cache names the answer to an earlier request. The comparison
tells which part of the request has changed since. A fingerprint has no text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import xxhash

from rootstock.engine.conversation.types import Conversation
from rootstock.engine.prompts.fair_memory import FairMemory
from rootstock.units import MIB

CAP_BYTES = 8 * MIB
_ENTRY_BYTES = 1_024
_DIGEST_BYTES = 64

# The first part that differs, in the order in which a cache depends on them.
Change = Literal["model", "tools", "system", "messages", "settings"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of the parts of a request from which its prompt is rendered."""

    model: str
    tools: tuple[bytes, ...]
    system: tuple[bytes, ...]  # of the messages before the first one of another role
    messages: tuple[bytes, ...]  # of the others
    settings: Mapping[str, bytes]  # the variables of the chat template, and the choice among the tools
    prompt_tokens: int

    @property
    def nbytes(self) -> int:
        parts = (self.tools, self.system, self.messages, self.settings)
        return _ENTRY_BYTES + _DIGEST_BYTES * sum(map(len, parts))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference between a request and an earlier one."""

    change: Change | None  # None: the request repeats the earlier one and may go on from there
    setting: str | None = None  # the name of the setting that has changed
    message: int | None = None  # the index of the first message that has changed, behind the system's
    earlier_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EarlierNotFound:
    """The answer that a client has named is unknown to its tenant, or was forgotten."""


def fingerprint_of(model: str, conversation: Conversation, prompt_tokens: int) -> Fingerprint:
    """Digests a request. Marks of shared prefixes move from request to request and do not count."""
    messages = conversation.messages
    system = list(takewhile(lambda message: message.role == "system", messages))
    settings = dict(conversation.options) | {"tool_choice": _plain(conversation.tool_choice)}
    return Fingerprint(
        model,
        tuple(map(_digest, conversation.tools)),
        tuple(map(_digest, system)),
        tuple(map(_digest, messages[len(system) :])),
        {name: _digest(value) for name, value in settings.items()},
        prompt_tokens,
    )


def compared(earlier: Fingerprint, later: Fingerprint) -> Comparison:
    """Finds the first part in which a request differs from an earlier one that it should continue."""
    tokens = earlier.prompt_tokens
    if earlier.model != later.model:
        return Comparison("model", earlier_prompt_tokens=tokens)
    if earlier.tools != later.tools:
        return Comparison("tools", earlier_prompt_tokens=tokens)
    if earlier.system != later.system:
        return Comparison("system", earlier_prompt_tokens=tokens)
    names = sorted({*earlier.settings, *later.settings})
    changed = next((name for name in names if earlier.settings.get(name) != later.settings.get(name)), None)
    if changed is not None:
        return Comparison("settings", setting=changed, earlier_prompt_tokens=tokens)
    for index, digest in enumerate(earlier.messages):
        if index >= len(later.messages) or later.messages[index] != digest:
            return Comparison("messages", message=index, earlier_prompt_tokens=tokens)
    return Comparison(None, earlier_prompt_tokens=tokens)


class Fingerprints:
    """Fingerprints of earlier requests by the id of their answer, a fair share for each tenant. For any thread."""

    def __init__(self, cap_bytes: int = CAP_BYTES) -> None:
        self._kept: FairMemory[Fingerprint] = FairMemory(cap_bytes)

    def add(self, salt: str, tenant: str, answer: str, fingerprint: Fingerprint) -> None:
        self._kept.put(tenant or salt, (salt, answer.encode()), fingerprint, fingerprint.nbytes)

    def compare(
        self, salt: str, tenant: str, answer: str, later: Fingerprint
    ) -> Comparison | EarlierNotFound:
        """Compares a request with the one of the same tenant and salt that got this answer."""
        earlier = self._kept.get(tenant or salt, (salt, answer.encode()))
        return EarlierNotFound() if earlier is None else compared(earlier, later)

    def forget(self, salt: str | None) -> None:
        """Drops the fingerprints of one salt, or all."""
        self._kept.forget(salt)


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps(_plain(value), default=str).encode())


def _plain(value: Any) -> Any:
    """Returns a value as JSON, with the names of its types, without marks."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            each.name: _plain(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.name != "marked"
        }
        return [type(value).__name__, fields]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
