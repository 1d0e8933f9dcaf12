"""Stored prefixes as `rootstock cache ls` shows them: a table, sentences, JSON, and the ends of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rootstock.cli.output import Column, age, counted, iso_time
from rootstock.errors import StartupError
from rootstock.text.tokenizer import ModelTokenizer
from rootstock.tiers.base import Entry
from rootstock.tiers.disk.prefixes import NamespaceContent, Prefix, Prefixes, PrefixNode
from rootstock.units import in_units

_TEXT_WORDS = 7  # of a prefix's text, at either end
_TEXT_TOKENS = 48  # decoded for them


def columns_of_prefixes(now_s: float, *, with_text: bool) -> list[Column[Prefix]]:
    number = "{:,}".format
    columns: list[Column[Prefix]] = [
        Column("key", "key", lambda prefix: prefix.key[:12]),
        Column("tokens", "tokens", lambda prefix: prefix.tokens, number, numeric=True),
        Column("families", "families", lambda prefix: ",".join(prefix.families), _spaced, wraps=True),
        Column("checkpoints", "checkpoints", lambda prefix: prefix.checkpoints, number, numeric=True),
        Column("own", "own_bytes", lambda prefix: prefix.own_bytes, in_units, numeric=True),
        Column("shared", "shared_bytes", lambda prefix: prefix.shared_bytes, in_units, numeric=True),
        Column("at", "last_use", lambda prefix: iso_time(prefix.last_use_s), wide=True),
        Column("last use", "age", lambda prefix: age(prefix.last_use_s, now_s), wraps=True),
        Column("uses", "uses", lambda prefix: prefix.uses, number, numeric=True, wide=True),
        Column("namespace", "namespace", lambda prefix: prefix.namespace[:8], wide=True),
    ]
    if with_text:
        columns.append(Column("text", "text", lambda prefix: prefix.text, wraps=True))
    return columns


def _spaced(families: str) -> str:
    return families.replace(",", ", ")


def summary_in_words(summary: dict[str, Any], prefixes: Prefixes, shown: int, now_s: float) -> list[str]:
    taken = f"{in_units(summary['directory_bytes'])} on disk"
    if summary["budget_bytes"]:
        share = summary["directory_bytes"] / summary["budget_bytes"]
        taken += f", {share:.1%} of {in_units(summary['budget_bytes'])}"
    if not prefixes.records:
        return [f"Nothing is stored ({taken})."]
    lines = [
        f"{counted(prefixes.records, 'record')}, {in_units(prefixes.stored_bytes)}; {taken}; last used between "
        f"{age(prefixes.oldest_use_s, now_s)} and {age(prefixes.newest_use_s, now_s)}."
    ]
    if shown < summary["prefixes"]:
        lines.append(
            f"{shown:,} of {summary['prefixes']:,} prefixes are shown, most recently used first: --limit 0 shows all."
        )
    lines += [_namespace_in_words(content) for content in prefixes.namespaces.values()]
    if prefixes.orphans:
        lines.append(
            f"{counted(prefixes.orphans, 'record')}, {in_units(prefixes.orphan_bytes)}, continue prefixes that are "
            "no longer stored: servers can use them after those prefixes are stored again."
        )
    if summary["struck_records"]:
        lines.append(f"{counted(summary['struck_records'], 'damaged row')} of the index deleted.")
    return lines


def _namespace_in_words(content: NamespaceContent) -> str:
    # The dtype of the model and the dtype of K and V, which `Namespace` joins by a colon.
    dtypes = sorted(" and ".join(dict.fromkeys(dtype.split(":"))) for dtype in content.dtypes)
    kept = f"{', '.join(content.families)} in {', '.join(dtypes)}"
    return (
        f"Namespace {content.namespace.hex()[:8]}: {kept}, "
        f"{counted(content.records, 'record')}, {in_units(content.stored_bytes)}."
    )


def prefix_as_json(prefix: Prefix) -> dict[str, Any]:
    return {
        "key": prefix.key,
        "namespace": prefix.namespace,
        "tokens": prefix.tokens,
        "families": prefix.families,
        "checkpoints": prefix.checkpoints,
        "own_bytes": prefix.own_bytes,
        "shared_bytes": prefix.shared_bytes,
        "last_use": iso_time(prefix.last_use_s),
        "uses": prefix.uses,
    } | ({"text": prefix.text} if prefix.text else {})


def namespace_as_json(content: NamespaceContent) -> dict[str, Any]:
    return {
        "namespace": content.namespace.hex(),
        "families": content.families,
        "dtypes": sorted(content.dtypes),
        "records": content.records,
        "bytes": content.stored_bytes,
    }


def add_texts(shown: Sequence[Prefix], entries: Iterable[Entry], tokenizer: ModelTokenizer) -> None:
    """Set the first and last words of each prefix. Tokens are read again: most records' tokens are not needed."""
    ends = []
    for prefix in shown:
        path = list(prefix.leaf.path())[::-1]
        first = [node for node in path if node.parent is None or node.parent.position < _TEXT_TOKENS]
        last = [node for node in path if prefix.leaf.position - node.position < _TEXT_TOKENS]
        ends.append((first, last))
    tokens: dict[bytes, list[int]] = {node.own: [] for pair in ends for part in pair for node in part}
    for entry in entries:
        identity = entry.identity
        known = tokens.get(identity.own)
        if known is not None and len(identity.tokens) > len(known):
            tokens[identity.own] = identity.tokens.tolist()
    for prefix, (first, last) in zip(shown, ends, strict=True):
        beginning = _words(tokenizer, _joined(first, tokens)[:_TEXT_TOKENS])
        end = _words(tokenizer, _joined(last, tokens)[-_TEXT_TOKENS:])
        if prefix.tokens <= _TEXT_TOKENS and len(beginning) <= 2 * _TEXT_WORDS:
            prefix.text = " ".join(beginning)
        else:
            prefix.text = " ".join([*beginning[:_TEXT_WORDS], "…", *end[-_TEXT_WORDS:]])


def _joined(nodes: Sequence[PrefixNode], tokens: dict[bytes, list[int]]) -> list[int]:
    joined: list[int] = []
    for node in nodes:
        run = tokens[node.own]
        new = len(run) if node.parent is None else node.position - node.parent.position
        joined += run[-new:]
    return joined


def _words(tokenizer: ModelTokenizer, tokens: Sequence[int]) -> list[str]:
    try:
        text = tokenizer.decode([token for token in tokens if not tokenizer.is_hidden(token)])
    except Exception as error:  # a tokenizer's own code may raise anything
        raise StartupError(
            f"The tokenizer can't decode the stored tokens ({error}). Give the served model's tokenizer."
        ) from error
    printable = "".join(char if char.isprintable() or char.isspace() else "�" for char in text)
    return printable.split()
