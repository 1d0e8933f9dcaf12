"""`rootstock cache`: looks into a directory of the disk tier while no server has it, and moves records in and out.

The tier knows records. People know prompts: `Prefixes` chains the records into them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from rootstock.cache.plan import Tokens
from rootstock.cache.record_identity import Identity, Kind, RecordKey
from rootstock.config import parse_bytes
from rootstock.engine.tokenizer import HFTokenizer, ModelTokenizer
from rootstock.errors import InvalidOption, StartupError
from rootstock.tiers.base import AlreadyStored, Entry, NotStored, Off, Stored
from rootstock.tiers.disk.archive import Unreadable, read_places
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.lock import LOCK_NAME
from rootstock.tiers.disk.prefixes import (
    NamespaceContent,
    Prefix,
    Prefixes,
    PrefixNode,
    along,
    is_orphan,
)
from rootstock.tiers.disk.reports import Failure, NotExported
from rootstock.tiers.disk.space import Budget, Usage, measure
from rootstock.tiers.disk.tier import SEGMENT_BYTES, DiskTier, Progress
from rootstock.units import in_units

EXIT_DAMAGED = 1

T = TypeVar("T")

_WORDS = 7  # of a prefix's text, at either end
_TOKENS_FOR_WORDS = 48
_STATUSES = "Exit status 0: {}. 1: {}. 2: {}."

cache_app = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What the server has as --disk-dir.")]


# -- verify --------------------------------------------------------------------------------------------------------


@cache_app.command(
    epilog=_STATUSES.format("every record is right", "some are damaged", "the directory can't be opened")
)
def verify(
    folder: Folder,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Strike the damaged records, so that a server computes them anew."),
    ] = False,
) -> None:
    """Read every record and say which are damaged. Without --repair nothing is changed."""
    with _opened(folder) as tier:
        usage = _usage(tier)
        with _progress("Reading records", usage.live_bytes) as progress:
            found = tier.verify(progress)
        _stop_if_off(tier)
        for failure in found.failures:
            print(_damage_in_words(failure))
        right = found.records - len(found.failures)
        print(
            f"{right:,} of {_counted(found.records, 'record')} are right, {in_units(found.stored_bytes)} read."
        )
        if usage.dead_bytes:
            print(
                f"{in_units(usage.dead_bytes)} belong to no record: a server frees them when it needs the room."
            )
        if usage.foreign:
            names = ", ".join(sorted(str(path.relative_to(folder)) for path in islice(usage.foreign, 3)))
            more = ", …" if len(usage.foreign) > 3 else ""
            print(
                f"{in_units(usage.foreign_bytes)} are files of other formats or of others ({names}{more}): they "
                "count against --disk-budget, and go first when room is needed."
            )
        if not found.failures:
            return
        if repair:
            tier.quarantine([failure.key for failure in found.failures])
            _stop_if_off(tier)
            print(
                f"{_counted(len(found.failures), 'damaged record')} struck: a server computes anew what is missing."
            )
        else:
            print(
                "A server would find the damage when it loads the record, and compute it anew. --repair strikes it."
            )
    raise typer.Exit(EXIT_DAMAGED)


def _damage_in_words(failure: Failure) -> str:
    identity = failure.identity
    where = "unknown\tits row in the index is damaged" if identity is None else _place_in_words(identity)
    return f"damaged\t{failure.miss.kind}\t{where}\t{failure.miss.detail}"


def _place_in_words(identity: Identity) -> str:
    place = (
        f"after {_counted(identity.end, 'token')}"
        if identity.kind is Kind.STATE
        else f"positions {identity.start}–{identity.end - 1}"
    )
    return f"{identity.family}\t{place}, namespace {identity.namespace.hex()[:8]}"


# -- ls ------------------------------------------------------------------------------------------------------------


@cache_app.command("ls", epilog="Exit status 0: it was listed. 2: the directory can't be opened.")
def list_prefixes(
    folder: Folder,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A directory or a hub name: shows how each text begins and ends."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Prefixes to show, those used last first. 0: all.")] = 50,
    disk_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The server's, to say how much of it is taken.")
    ] = None,
) -> None:
    """List the prefixes that are stored: how far they go, what they take and share, when they were last used."""
    budget_bytes = None if disk_budget is None else parse_bytes(disk_budget, "--disk-budget")
    codec = None if tokenizer is None else HFTokenizer.load(tokenizer)
    with _opened(folder) as tier:
        with _progress("Reading the index") as progress:
            prefixes = Prefixes.of(_counting(tier.entries(), progress))
            leaves = prefixes.leaves()
            shown = [prefixes.described(leaf) for leaf in (leaves[:limit] if limit else leaves)]
            if codec is not None:
                _add_texts(shown, tier.entries(), codec)
        _stop_if_off(tier)
        usage = _usage(tier)
        struck = tier.counts.quarantined_records
    summary = {
        "records": prefixes.records,
        "record_bytes": prefixes.stored_bytes,
        "directory_bytes": usage.total_bytes,
        "budget_bytes": budget_bytes,
        "oldest_use": _iso(prefixes.oldest_use_s) if prefixes.records else None,
        "newest_use": _iso(prefixes.newest_use_s) if prefixes.records else None,
        "prefixes": len(leaves),
        "namespaces": [_namespace_as_json(content) for content in prefixes.namespaces.values()],
        "orphans": {"records": prefixes.orphans, "bytes": prefixes.orphan_bytes},
        "struck_records": struck,
    }
    now_s = time.time()
    if as_json:
        listed = {"summary": summary, "prefixes": [_prefix_as_json(prefix) for prefix in shown]}
        print(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    lines = _summary_in_words(summary, prefixes, len(shown), now_s)
    if sys.stdout.isatty():
        _print_table(shown, now_s, with_text=codec is not None)
        print("\n".join(lines))
    else:
        _print_rows(shown, now_s, with_text=codec is not None)
        print("\n".join(f"# {line}" for line in lines))


def _summary_in_words(summary: dict[str, Any], prefixes: Prefixes, shown: int, now_s: float) -> list[str]:
    taken = f"{in_units(summary['directory_bytes'])} on disk"
    if summary["budget_bytes"]:
        share = summary["directory_bytes"] / summary["budget_bytes"]
        taken += f", {share:.1%} of {in_units(summary['budget_bytes'])}"
    if not prefixes.records:
        return [f"Nothing is stored ({taken})."]
    lines = [
        f"{_counted(prefixes.records, 'record')}, {in_units(prefixes.stored_bytes)}; {taken}; last used between "
        f"{_ago(prefixes.oldest_use_s, now_s)} and {_ago(prefixes.newest_use_s, now_s)}."
    ]
    if shown < summary["prefixes"]:
        lines.append(
            f"{shown:,} of {summary['prefixes']:,} prefixes are shown, those used last: --limit 0 shows all."
        )
    lines += [_namespace_in_words(content) for content in prefixes.namespaces.values()]
    if prefixes.orphans:
        lines.append(
            f"{_counted(prefixes.orphans, 'record')}, {in_units(prefixes.orphan_bytes)}, continue what is gone: they "
            "are of use again once a server has computed and stored it."
        )
    if summary["struck_records"]:
        lines.append(f"{_counted(summary['struck_records'], 'damaged row')} of the index struck.")
    return lines


_NARROW = 120  # columns of a terminal


def _print_table(shown: Sequence[Prefix], now_s: float, *, with_text: bool) -> None:
    console = Console()
    if not shown:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns: list[tuple[str, Callable[[Prefix], str]]] = [
        ("key", lambda prefix: prefix.key[:12]),
        ("tokens", lambda prefix: f"{prefix.tokens:,}"),
        ("families", lambda prefix: ", ".join(prefix.families)),
        ("checkpoints", lambda prefix: f"{prefix.checkpoints:,}"),
        ("own", lambda prefix: in_units(prefix.own_bytes)),
        ("shared", lambda prefix: in_units(prefix.shared_bytes)),
        ("last use", lambda prefix: _ago(prefix.last_use_s, now_s)),
    ]
    if console.width >= _NARROW:
        columns += [
            ("at", lambda prefix: _iso(prefix.last_use_s)),
            ("uses", lambda prefix: f"{prefix.uses:,}"),
            ("namespace", lambda prefix: prefix.namespace[:8]),
        ]
    if with_text:
        columns.append(("text", lambda prefix: prefix.text))
    for name, _ in columns:
        is_number = name in ("tokens", "checkpoints", "own", "shared", "uses")
        table.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=name not in ("families", "last use", "text"),
        )
    for prefix in shown:
        table.add_row(*(Text(cell(prefix)) for _, cell in columns))
    console.print(table)


def _print_rows(shown: Sequence[Prefix], now_s: float, *, with_text: bool) -> None:
    names = [
        "key",
        "tokens",
        "families",
        "checkpoints",
        "own_bytes",
        "shared_bytes",
        "last_use",
        "age",
        "uses",
    ]
    print("\t".join([*names, "namespace", *(["text"] if with_text else [])]))
    for prefix in shown:
        cells = (
            prefix.key[:12],
            prefix.tokens,
            ",".join(prefix.families),
            prefix.checkpoints,
            prefix.own_bytes,
            prefix.shared_bytes,
            _iso(prefix.last_use_s),
            _ago(prefix.last_use_s, now_s),
            prefix.uses,
            prefix.namespace[:8],
        )
        texts = (prefix.text,) if with_text else ()
        print("\t".join(str(cell) for cell in (*cells, *texts)))


# -- export and import ---------------------------------------------------------------------------------------------


@cache_app.command(
    "export",
    epilog=_STATUSES.format(
        "FILE holds all that was chosen", "damaged records were left out", "nothing was written"
    ),
)
def export(
    folder: Folder,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Appears when it is whole. An older archive is replaced.")
    ],
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only records of this namespace, as ls shows it, or its beginning."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only a prefix that ls shows, by its key or the key's beginning."),
    ] = None,
    prefix_text: Annotated[
        str | None,
        typer.Option(help="Only what leads to this text and what continues it. Needs --tokenizer."),
    ] = None,
    prefix_tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="The same by token ids.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For --prefix-text: a directory or a hub name.")
    ] = None,
    limit_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of records: what was used last first, none without what it continues."
        ),
    ] = None,
) -> None:
    """Write records into one file: all of them, or those of a namespace or of a prefix.

    They are of use only to a server with the same weights, dtype and tenant: no other finds them. The file holds what
    was said in the prompts, as tokens."""
    if sum(option is not None for option in (key, prefix_text, prefix_tokens)) > 1:
        raise StartupError("--key, --prefix-text and --prefix-tokens each choose a prefix: give one of them.")
    if prefix_text is not None and tokenizer is None:
        raise StartupError(
            "--prefix-text needs --tokenizer MODEL, a directory or a hub name, to become tokens."
        )
    chosen_tokens: list[Tokens] = []
    if prefix_tokens is not None:
        chosen_tokens = [_parse_tokens(prefix_tokens)]
    elif prefix_text is not None and tokenizer is not None:
        codec = HFTokenizer.load(tokenizer)
        # As a completion's prompt and as a chat's: some tokenizers put a first token before the former.
        chosen_tokens = [codec.encode(prefix_text), codec.encode_chat(prefix_text)]
        if not len(chosen_tokens[1]):
            raise InvalidOption("--prefix-text", prefix_text, "a text of one token at least")
    most_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "--limit-bytes")
    _refuse_to_overwrite(file)

    with _opened(folder) as tier:
        only = None if namespace is None else _find_namespace(tier, namespace)
        with _progress("Reading the index") as progress:
            chosen = _chosen(tier, only, key, chosen_tokens, most_bytes, progress)
        _stop_if_off(tier)
        if not chosen:
            raise StartupError(f"{folder} holds no such record, so that there is nothing to export.")
        with _progress("Copying records", len(chosen)) as progress:
            written = tier.export(_counting(chosen, progress), file)
    if isinstance(written, NotExported):
        raise StartupError(f"Nothing was exported: {written.reason}")
    print(
        f"{_counted(written.records, 'record')} written to {file}, {in_units(written.archive_bytes)}. They are "
        "of use only to a server with the same weights, dtype and tenant."
    )
    if written.failures:
        kinds = Counter(failure.miss.kind for failure in written.failures)
        told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        print(
            f"{_counted(len(written.failures), 'record')} left out, damaged: {told}. See `rootstock cache verify`."
        )
        raise typer.Exit(EXIT_DAMAGED)


@cache_app.command(
    "import",
    epilog=_STATUSES.format(
        "the directory has every record of FILE",
        "some were damaged or refused, and all others are there",
        "nothing was changed",
    ),
)
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What a server has as --disk-dir. Made if it is not there.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="From `rootstock cache export`.")],
    disk_budget: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that the directory may take: the server's.")
    ],
) -> None:
    """Take in the records of a file, each verified.

    They are of use only to a server with the same weights, dtype and tenant: no other finds them."""
    cap_bytes = parse_bytes(disk_budget, "--disk-budget")
    places = read_places(Files(), file)
    if isinstance(places, Unreadable):
        raise StartupError(f"{file} can't be imported: {places.reason}. Nothing was changed.")
    total_bytes = sum(place.stored_bytes for place in places)
    _refuse_to_evict(folder, cap_bytes, total_bytes)

    tier = DiskTier.open(folder, cap_bytes)
    if isinstance(tier, Off):
        raise StartupError(tier.reason)
    try:
        with _progress("Taking in records", total_bytes) as progress:
            imported = tier.import_(file, progress)
    finally:
        tier.close()
    if isinstance(imported, Unreadable):
        raise StartupError(f"{file} can't be imported: {imported.reason}. Nothing was changed.")
    stored = [outcome for outcome in imported.outcomes if isinstance(outcome, Stored)]
    already = sum(isinstance(outcome, AlreadyStored) for outcome in imported.outcomes)
    refused = Counter(
        f"{outcome.why}\t{outcome.detail}" for outcome in imported.outcomes if isinstance(outcome, NotStored)
    )
    damaged = Counter(f"{miss.kind}\t{miss.detail}" for miss in imported.damaged)
    print(f"stored\t{len(stored)}\t{in_units(sum(outcome.stored_bytes for outcome in stored))}")
    print(f"already there\t{already}")
    for what, counted in (("damaged", damaged), ("refused", refused)):
        for why, count in counted.most_common():
            print(f"{what}\t{count}\t{why}")
    if tier.counts.indexes_lost:
        print("The index of the directory could not be read: the records that were there before are lost.")
    if evicted := tier.room_counts.evicted_records:
        print(f"{_counted(evicted, 'record')} evicted to make room, the least recently used.")
    print("The records are of use only to a server with the same weights, dtype and tenant.")
    if damaged or refused:
        raise typer.Exit(EXIT_DAMAGED)


def _refuse_to_overwrite(file: Path) -> None:
    """Unless it is an archive, which may have been made by an earlier export."""
    if os.path.exists(file) and isinstance(found := read_places(Files(), file), Unreadable):
        raise StartupError(f"{file} is there and is not replaced: {found.reason}. Give another name.")


def _refuse_to_evict(folder: Path, cap_bytes: int, total_bytes: int) -> None:
    """A budget that was mistyped must not cost the records that are there, nor the first half of the file."""
    usable_bytes = Budget.of(cap_bytes, SEGMENT_BYTES).usable_bytes
    if total_bytes > usable_bytes:
        raise StartupError(
            f"The file holds {in_units(total_bytes)} of records, and a --disk-budget of {in_units(cap_bytes)} has "
            f"room for {in_units(max(0, usable_bytes))}. Give a larger one, or export less with --limit-bytes."
        )
    if not os.path.exists(folder / LOCK_NAME):
        return
    try:
        there_bytes = measure(Files(), folder, 0).total_bytes
    except OSError as error:
        raise StartupError(f"{folder} can't be used: {error}.") from error
    if there_bytes > cap_bytes:
        raise StartupError(
            f"{folder} takes {in_units(there_bytes)}, more than a --disk-budget of {in_units(cap_bytes)}: records "
            "would be evicted first. Give the server's --disk-budget."
        )


def _parse_tokens(listed: str) -> Tokens:
    try:
        return np.array([int(token) for token in listed.split(",")], np.int32)
    except (ValueError, OverflowError):
        raise InvalidOption("--prefix-tokens", listed, "token ids such as 1,2,3") from None


def _find_namespace(tier: DiskTier, beginning: str) -> bytes:
    there = {entry.identity.namespace for entry in tier.entries()}
    found = [one for one in there if one.hex().startswith(beginning.lower())]
    if len(found) != 1:
        listed = ", ".join(sorted(one.hex()[:8] for one in there)) or "none"
        raise InvalidOption(
            "--namespace", beginning, f"the beginning of exactly one of those that are there: {listed}"
        )
    return found[0]


def _chosen(
    tier: DiskTier,
    namespace: bytes | None,
    key: str | None,
    tokens: Sequence[Tokens],
    most_bytes: int | None,
    progress: Progress,
) -> list[RecordKey]:
    """Keys of the records to export, each after what it continues."""

    def entries() -> Iterator[Entry]:
        for entry in _counting(tier.entries(), progress):
            if namespace is None or entry.identity.namespace == namespace:
                yield entry

    if key is None and not tokens and most_bytes is None:
        return [entry.identity.key for entry in entries()]
    prefixes = Prefixes.of(entries())
    wanted: set[bytes] | None = None
    if key is not None:
        leaf = prefixes.find(key)
        wanted = {node.own for node in leaf.path()} | prefixes.below({leaf.own})
    elif tokens:
        stored = max((along(entries(), prompt) for prompt in tokens), key=lambda found: found.reached)
        if not stored.at_end:
            raise StartupError(
                f"Of that prefix, only {stored.reached:,} of {_counted(stored.tokens, 'token')} are stored. Give a "
                "shorter one: where a text goes on, its last word may have other tokens than at an end."
            )
        wanted = stored.path | prefixes.below(stored.at_end)
    if most_bytes is None:
        assert wanted is not None
        return [entry.identity.key for entry in entries() if entry.identity.own in wanted]

    # What was used last first; and of what was used together, what others continue.
    prefixes.use_with_what_follows()
    candidates = []
    for order, entry in enumerate(entries()):
        node = prefixes.nodes[entry.identity.own]
        if not is_orphan(node) and (wanted is None or node.own in wanted):
            candidates.append(
                (-node.last_use_s, node.position, order, entry.stored_bytes, entry.identity.key)
            )
    candidates.sort()
    taken: list[tuple[int, RecordKey]] = []
    for _, _, order, stored_bytes, record_key in candidates:
        most_bytes -= stored_bytes
        if most_bytes < 0:
            break
        taken.append((order, record_key))
    return [record_key for _, record_key in sorted(taken)]


# -- what is shown -------------------------------------------------------------------------------------------------


def _prefix_as_json(prefix: Prefix) -> dict[str, Any]:
    return {
        "key": prefix.key,
        "namespace": prefix.namespace,
        "tokens": prefix.tokens,
        "families": prefix.families,
        "checkpoints": prefix.checkpoints,
        "own_bytes": prefix.own_bytes,
        "shared_bytes": prefix.shared_bytes,
        "last_use": _iso(prefix.last_use_s),
        "uses": prefix.uses,
    } | ({"text": prefix.text} if prefix.text else {})


def _namespace_as_json(content: NamespaceContent) -> dict[str, Any]:
    return {
        "namespace": content.namespace.hex(),
        "families": content.families,
        "dtypes": sorted(content.dtypes),
        "records": content.records,
        "bytes": content.stored_bytes,
    }


def _namespace_in_words(content: NamespaceContent) -> str:
    kept = f"{', '.join(content.families)} in {', '.join(sorted(content.dtypes))}"
    return (
        f"Namespace {content.namespace.hex()[:8]}: {kept}, "
        f"{_counted(content.records, 'record')}, {in_units(content.stored_bytes)}."
    )


# -- texts ---------------------------------------------------------------------------------------------------------


def _add_texts(shown: Sequence[Prefix], entries: Iterable[Entry], codec: ModelTokenizer) -> None:
    """The first and the last words of each, for which the tokens are looked up anew: of most records they are not
    needed."""
    ends = [(_first_nodes(prefix.leaf), _last_nodes(prefix.leaf)) for prefix in shown]
    tokens: dict[bytes, list[int]] = {node.own: [] for pair in ends for part in pair for node in part}
    for entry in entries:
        identity = entry.identity
        known = tokens.get(identity.own)
        if known is not None and len(identity.tokens) > len(known):
            tokens[identity.own] = identity.tokens.tolist()
    for prefix, (first, last) in zip(shown, ends, strict=True):
        beginning = _words(codec, _joined(first, tokens)[:_TOKENS_FOR_WORDS])
        end = _words(codec, _joined(last, tokens)[-_TOKENS_FOR_WORDS:])
        if prefix.tokens <= _TOKENS_FOR_WORDS and len(beginning) <= 2 * _WORDS:
            prefix.text = " ".join(beginning)
        else:
            prefix.text = " ".join([*beginning[:_WORDS], "…", *end[-_WORDS:]])


def _first_nodes(leaf: PrefixNode) -> list[PrefixNode]:
    path = list(leaf.path())[::-1]
    enough = next((i for i, node in enumerate(path) if node.position >= _TOKENS_FOR_WORDS), len(path) - 1)
    return path[: enough + 1]


def _last_nodes(leaf: PrefixNode) -> list[PrefixNode]:
    nodes = []
    for node in leaf.path():
        nodes.append(node)
        if node.parent is None or leaf.position - node.parent.position >= _TOKENS_FOR_WORDS:
            break
    return nodes[::-1]


def _joined(nodes: Sequence[PrefixNode], tokens: dict[bytes, list[int]]) -> list[int]:
    joined: list[int] = []
    for node in nodes:
        run = tokens[node.own]
        new = len(run) if node.parent is None else node.position - node.parent.position
        joined += run[-new:]
    return joined


def _words(codec: ModelTokenizer, tokens: Sequence[int]) -> list[str]:
    try:
        text = codec.decode([token for token in tokens if not codec.is_hidden(token)])
    except Exception as error:  # whatever a tokenizer's own code raises
        raise StartupError(
            f"The tokenizer can't decode what is stored ({error}). Give the one of the model that was served."
        ) from error
    printable = "".join(char if char.isprintable() or char.isspace() else "�" for char in text)
    return printable.split()


# -- all commands --------------------------------------------------------------------------------------------------


@contextmanager
def _opened(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open_as_found(folder)
    if isinstance(tier, Off):
        raise StartupError(tier.reason)
    try:
        yield tier
    finally:
        tier.close()


def _stop_if_off(tier: DiskTier) -> None:
    if isinstance(tier.state, Off):
        raise StartupError(f"The directory could not be read to its end: {tier.state.reason}.")


@contextmanager
def _progress(words: str, total: int | None = None) -> Iterator[Progress]:
    """A bar on a terminal, of unknown length without `total`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=total)
        yield lambda done: bar.advance(task, done)


def _counting(items: Iterable[T], progress: Progress) -> Iterator[T]:
    for item in items:
        yield item
        progress(1)


def _usage(tier: DiskTier) -> Usage:
    try:
        return tier.usage()
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"The directory can't be measured: {error}.") from error


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ago(time_s: float, now_s: float) -> str:
    passed_s = max(0, int(now_s - time_s))
    for unit, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if passed_s >= unit_s:
            return f"{_counted(passed_s // unit_s, unit)} ago"
    return f"{_counted(passed_s, 'second')} ago"
