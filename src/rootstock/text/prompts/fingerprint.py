"""Fingerprints of requests: digests by which a later request is compared with an earlier one.

A client that asks why its prompt was not found in the cache names the answer to an earlier request. The comparison
tells which part of the request has changed since. A fingerprint has no text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import xxhash

from rootstock.cache.fair_memory import FairMemory, Key
from rootstock.text.conversation.template import TemplateInput
from rootstock.text.prompts.tenant_salt import PromptOwner
from rootstock.units import MIB

CAP_BYTES = 8 * MIB
_ENTRY_BYTES = 1_024
_DIGEST_BYTES = 64
# They change the end of a prompt only, behind all that a later one repeats.
_OF_THE_END = ("add_generation_prompt", "continue_final_message")

# The first part that differs, in the order in which a cache depends on them.
Change = Literal["model", "tools", "system", "messages", "settings"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of the parts from which the chat template renders a prompt.

    A field of a request that the template does not get changes no prompt, and no fingerprint.
    """

    model: str
    tools: tuple[bytes, ...]
    system: tuple[bytes, ...]  # of the messages before the first one of another role
    messages: tuple[bytes, ...]  # of the others
    settings: Mapping[str, bytes]  # other variables of the template
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


def fingerprint_of(model: str, template: TemplateInput, prompt_tokens: int) -> Fingerprint:
    """Digests a request."""
    messages = template.messages
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    return Fingerprint(
        model,
        tuple(map(_digest, template.tools)),
        tuple(map(_digest, system)),
        tuple(map(_digest, messages[len(system) :])),
        {name: _digest(value) for name, value in template.options.items() if name not in _OF_THE_END},
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

    def add(self, owner: PromptOwner, answer: str, fingerprint: Fingerprint) -> None:
        self._kept.put(owner.share, _key(owner, answer), fingerprint, fingerprint.nbytes)

    def compare(self, owner: PromptOwner, answer: str, later: Fingerprint) -> Comparison | EarlierNotFound:
        """Compares a request with the one of the same owner that got this answer."""
        earlier = self._kept.get(owner.share, _key(owner, answer))
        return EarlierNotFound() if earlier is None else compared(earlier, later)

    def forget(self, salt: str | None) -> None:
        """Drops the fingerprints of one salt, or all."""
        self._kept.forget(salt)


def _key(owner: PromptOwner, answer: str) -> Key:
    return owner.salt, answer.encode(errors="surrogatepass")  # a client may name anything


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps(value, default=str).encode())
