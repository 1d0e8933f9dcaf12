"""The file of `--api-keys`: keys with their tenants and roles, and the limits of tenants."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from rootstock.cache.retention.hint_types import RetainedLimits
from rootstock.config import KEY_FORM, MAX_KEYS, MAX_MODEL_NAME_CHARS, MAX_SALT_LENGTH, is_key
from rootstock.errors import InvalidOption, shown
from rootstock.options import parse_bytes
from rootstock.units import MIB, in_units

OPTION = "--api-keys"
MAX_FILE_BYTES = 64 * MIB
MAX_LIMIT = 10**15
NO_RETAINED_LIMIT = 2**63  # more than any cache has
MAX_MODELS = 1024
_PARTS = ("keys", "tenants", "default")
_STRUCTURED = re.compile(rf"\s*(?:\{{|---|(?:{'|'.join(_PARTS)})\s*:)")

Digest = bytes  # SHA-256 of a key


class Role(StrEnum):
    USER = "user"
    OPERATOR = "operator"  # as the admin key: may see and clear the data of all tenants
    METRICS = "metrics"  # may read /metrics and nothing else


@dataclass(frozen=True, slots=True)
class KeyRule:
    tenant: str  # "": none
    role: Role = Role.USER


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant, over all of its keys. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    uncached_tokens_per_minute: int | None = None  # of prompts, that are not found in the cache
    max_concurrency: int | None = None  # requests in progress
    retained_bytes: int | None = None  # of the cache, that hints may keep
    models: frozenset[str] | None = None  # names that requests may ask for


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The content of a file of keys."""

    keys: Mapping[Digest, KeyRule] = field(default_factory=dict, repr=False)
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    default: TenantLimits = NO_LIMITS  # of every other tenant, and of requests without one

    @property
    def retained(self) -> RetainedLimits:
        """The limits of retained bytes. A named tenant without one has none."""
        default = self.default.retained_bytes
        return RetainedLimits(
            {
                tenant: NO_RETAINED_LIMIT if limits.retained_bytes is None else limits.retained_bytes
                for tenant, limits in self.tenants.items()
            },
            default,
        )


def digest_of(key: str | bytes) -> Digest:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def read_rules(path: Path) -> AccessRules:
    """Reads a file of keys: YAML or JSON, or lines `KEY TENANT`. Raises InvalidOption, which shows no key."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        told = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidOption(OPTION, str(path), f"a file that can be read ({told})") from None
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidOption(OPTION, str(path), f"a file of at most {in_units(MAX_FILE_BYTES)}")
    content = "\n".join(
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    )
    if _STRUCTURED.match(content):
        return _RulesReader(path).rules(_parsed(path, text))
    return AccessRules(_lines(path, text))


def _lines(path: Path, text: str) -> dict[Digest, KeyRule]:
    """Reads lines `KEY TENANT`. Empty lines and lines that begin with # are skipped."""
    keys: dict[Digest, KeyRule] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, *tenant = line.split()
        where = f"{path}, line {number}"
        if not is_key(key) or len(tenant) != 1 or len(tenant[0]) > MAX_SALT_LENGTH:
            allowed = f"a key ({KEY_FORM}), a space and a tenant of 1 to {MAX_SALT_LENGTH:,} characters"
            raise InvalidOption(OPTION, where, allowed)
        if digest_of(key) in keys:
            raise InvalidOption(OPTION, where, "a key that is on no other line")
        keys[digest_of(key)] = KeyRule(tenant[0])
    if not 1 <= len(keys) <= MAX_KEYS:
        raise InvalidOption(OPTION, str(path), f"a file with 1 to {MAX_KEYS:,} keys")
    return keys


def _parsed(path: Path, text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            # The error shows only the line: the decoder's own text may be read as YAML.
            line = getattr(error, "lineno", 1)
            raise InvalidOption(OPTION, f"{path}, line {line}", "valid JSON") from None
    import yaml

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it cannot be read"
        # The error's own text quotes the line, which may hold a key.
        where = f"{path}, line {mark.line + 1 if mark else 1}"
        raise InvalidOption(OPTION, where, f"valid YAML ({problem})") from None


class _RulesReader:
    """Checks the values of a file. Its errors name a place such as `keys[3].role`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rules(self, content: Any) -> AccessRules:
        entries = self._mapping(content, "the file", _PARTS)
        tenants = entries.get("tenants")
        if not isinstance(tenants, dict | None):
            raise self._wrong("tenants", "a mapping of tenants to limits")
        named = {
            self._name(name, "tenants", MAX_SALT_LENGTH): self._limits(value, f"tenants.{shown(name)}")
            for name, value in (tenants or {}).items()
        }
        return AccessRules(
            self._keys(entries.get("keys")), named, self._limits(entries.get("default"), "default")
        )

    def _keys(self, listed: Any) -> dict[Digest, KeyRule]:
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KEYS:
            raise self._wrong("keys", f"a list of 1 to {MAX_KEYS:,} keys")
        keys: dict[Digest, KeyRule] = {}
        for at, value in enumerate(listed):
            where = f"keys[{at}]"
            entry = self._mapping(value, where, ("key", "sha256", "tenant", "role"))
            digest = self._digest(entry, where)
            if digest in keys:
                raise self._wrong(where, "a key that is nowhere else in the file")
            role = entry.get("role", Role.USER)
            if role not in list(Role):
                raise self._wrong(f"{where}.role", " | ".join(Role))
            tenant = entry.get("tenant")
            if tenant is None and role == Role.USER:
                raise self._wrong(f"{where}.tenant", "the name of a tenant")
            named = "" if tenant is None else self._name(tenant, f"{where}.tenant", MAX_SALT_LENGTH)
            keys[digest] = KeyRule(named, Role(role))
        return keys

    def _digest(self, entry: Mapping[str, Any], where: str) -> Digest:
        key, sha256 = entry.get("key"), entry.get("sha256")
        if (key is None) == (sha256 is None):
            raise self._wrong(where, "an entry with either 'key' or 'sha256'")
        if sha256 is not None:
            if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
                raise self._wrong(f"{where}.sha256", "64 hexadecimal digits, in quotes")
            return bytes.fromhex(sha256)
        if not isinstance(key, str) or not is_key(key):
            raise self._wrong(f"{where}.key", f"a string of {KEY_FORM}")
        return digest_of(key)

    def _limits(self, value: Any, where: str) -> TenantLimits:
        names = tuple(each.name for each in fields(TenantLimits))
        entry = {} if value is None else self._mapping(value, where, names)
        found: dict[str, Any] = {}
        for name, limit in entry.items():
            place = f"{where}.{name}"
            match name:
                case _ if limit is None:
                    found[name] = None
                case "models":
                    if not isinstance(limit, list) or len(limit) > MAX_MODELS:
                        raise self._wrong(place, f"a list of at most {MAX_MODELS:,} names")
                    found[name] = frozenset(self._name(each, place, MAX_MODEL_NAME_CHARS) for each in limit)
                case "retained_bytes" if isinstance(limit, str):
                    try:
                        found[name] = parse_bytes(limit)
                    except InvalidOption:
                        raise self._wrong(place, "a size such as 512MiB") from None
                case _:
                    least = 0 if name == "retained_bytes" else 1
                    if type(limit) is not int or not least <= limit <= MAX_LIMIT:
                        raise self._wrong(place, f"a whole number from {least} to {MAX_LIMIT:,}")
                    found[name] = limit
        return TenantLimits(**found)

    def _mapping(self, value: Any, where: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(where, f"a mapping with {', '.join(names)}")
        for name in value:
            if name not in names:
                # The name is not shown: it may be a key in a wrong place.
                raise self._wrong(where, f"a mapping with no other fields than {', '.join(names)}")
        return value

    def _name(self, value: Any, where: str, most: int) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
            raise self._wrong(where, f"a string of 1 to {most:,} printable characters")
        return value

    def _wrong(self, where: str, allowed: str) -> InvalidOption:
        return InvalidOption(OPTION, f"{self._path}, {where}", allowed)
