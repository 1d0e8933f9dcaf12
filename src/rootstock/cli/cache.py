"""`rootstock cache`: inspects a directory of the disk tier that no server uses, and moves records in and out.

Prefixes move in and out of running servers in `live_cache`.

The tier stores records. A user knows prompts: `Prefixes` chains the records into them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from rootstock.cache.keys import Identity, Kind, RecordKey
from rootstock.cache.types import Tokens
from rootstock.cli import live_cache as live
from rootstock.cli import options
from rootstock.cli.output import Column, age, counted, iso_time, print_table, progress_bar
from rootstock.config import parse_bytes
from rootstock.engine.tokenizer import HFTokenizer, ModelTokenizer
from rootstock.errors import InvalidOption, StartupError
from rootstock.server.declared_prompts import read_warm_file
from rootstock.tiers.base import AlreadyStored, Entry, NotStored, Off, Stored
from rootstock.tiers.disk.archive import Unreadable, read_places
from rootstock.tiers.disk.files import LOCK_NAME, Files
from rootstock.tiers.disk.prefixes import (
    NamespaceContent,
    Prefix,
    Prefixes,
    PrefixNode,
    along,
    is_orphan,
)
from rootstock.tiers.disk.reports import Failure, NotExported
from rootstock.tiers.disk.signature import BundleKey
from rootstock.tiers.disk.space import Budget, Usage, measure
from rootstock.tiers.disk.tier import SEGMENT_BYTES, DiskTier, Progress
from rootstock.units import in_units

EXIT_DAMAGED = 1

T = TypeVar("T")

_TEXT_WORDS = 7  # of a prefix's text, at either end
_TEXT_TOKENS = 48  # decoded for them
_STATUSES = "Exit status 0: {}. 1: {}. 2: {}."
_SAME_SERVER = "Only a server with the same weights, dtype and tenant can use these records."

cache_app = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Directory that servers get as --disk-dir.")]
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="[DIR] FILE",
        help="Directory that servers get as --disk-dir, and the archive. The archive alone for a running server.",
    ),
]
TokenizerOf = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model directory or Hub name, for texts instead of token ids."),
]


# -- verify --------------------------------------------------------------------------------------------------------


@cache_app.command(
    cls=options.Command,
    epilog=_STATUSES.format("every record is right", "some are damaged", "the directory can't be opened"),
)
def verify(
    folder: Folder,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete damaged records from the index. Servers recompute them."),
    ] = False,
) -> None:
    """Read every record and list the damaged ones. Without --repair nothing is changed."""
    with _opened(DiskTier.open_as_found(folder)) as tier:
        usage = _usage(tier)
        with progress_bar("Reading records", usage.live_bytes) as progress:
            found = tier.verify(progress)
        _stop_if_off(tier)
        for failure in found.failures:
            print(_damage_in_words(failure))
        right = found.records - len(found.failures)
        print(
            f"{right:,} of {counted(found.records, 'record')} are right, {in_units(found.stored_bytes)} read."
        )
        if usage.dead_bytes:
            print(
                f"{in_units(usage.dead_bytes)} belong to no record: servers free them when they need space."
            )
        if usage.foreign:
            names = ", ".join(sorted(str(path.relative_to(folder)) for path in islice(usage.foreign, 3)))
            more = ", …" if len(usage.foreign) > 3 else ""
            print(
                f"{in_units(usage.foreign_bytes)} are files of other formats or programs ({names}{more}): "
                "they count against --disk-budget, and are deleted first when space is needed."
            )
        if not found.failures:
            return
        if repair:
            tier.quarantine([failure.key for failure in found.failures])
            _stop_if_off(tier)
            print(f"{counted(len(found.failures), 'damaged record')} deleted: servers recompute them.")
        else:
            print("Servers detect the damage when they load a record, and recompute it. --repair deletes it.")
    raise typer.Exit(EXIT_DAMAGED)


def _damage_in_words(failure: Failure) -> str:
    identity = failure.identity
    where = "unknown\tits row in the index is damaged" if identity is None else _place_in_words(identity)
    return f"damaged\t{failure.miss.kind}\t{where}\t{failure.miss.detail}"


def _place_in_words(identity: Identity) -> str:
    place = (
        f"after {counted(identity.end, 'token')}"
        if identity.kind is Kind.STATE
        else f"positions {identity.start}–{identity.end - 1}"
    )
    return f"{identity.family}\t{place}, namespace {identity.namespace.hex()[:8]}"


# -- ls ------------------------------------------------------------------------------------------------------------


@cache_app.command(
    "ls", cls=options.Command, epilog="Exit status 0: prefixes are listed. 2: the directory can't be opened."
)
def list_prefixes(
    folder: Folder,
    tokenizer: TokenizerOf = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="ROOTSTOCK_CACHE_LS_JSON", help="Print one JSON object.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=0, help="Maximum number of prefixes, most recently used first. 0: all.")
    ] = 50,
    disk_budget: Annotated[str | None, options.DISK_BUDGET] = None,
) -> None:
    """List stored prefixes: length, size, shared size and last use.

    With --tokenizer, also the first and last words. With --disk-budget, also the used share of it."""
    budget_bytes = None if disk_budget is None else parse_bytes(disk_budget, "--disk-budget")
    loaded = None if tokenizer is None else HFTokenizer.load(tokenizer)
    with _opened(DiskTier.open_as_found(folder)) as tier:
        with progress_bar("Reading the index") as progress:
            prefixes = Prefixes.of(_counting(tier.entries(), progress))
            leaves = prefixes.leaves()
            shown = [prefixes.described(leaf) for leaf in (leaves[:limit] if limit else leaves)]
            if loaded is not None:
                _add_texts(shown, tier.entries(), loaded)
        _stop_if_off(tier)
        usage = _usage(tier)
        struck = tier.counts.quarantined_records
    summary = {
        "records": prefixes.records,
        "record_bytes": prefixes.stored_bytes,
        "directory_bytes": usage.total_bytes,
        "budget_bytes": budget_bytes,
        "oldest_use": iso_time(prefixes.oldest_use_s) if prefixes.records else None,
        "newest_use": iso_time(prefixes.newest_use_s) if prefixes.records else None,
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
    print_table(_columns(now_s, with_text=loaded is not None), shown)
    mark = "" if sys.stdout.isatty() else "# "
    for line in _summary_in_words(summary, prefixes, len(shown), now_s):
        print(f"{mark}{line}")


def _summary_in_words(summary: dict[str, Any], prefixes: Prefixes, shown: int, now_s: float) -> list[str]:
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


def _spaced(families: str) -> str:
    return families.replace(",", ", ")


def _columns(now_s: float, *, with_text: bool) -> list[Column[Prefix]]:
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


# -- export and import ---------------------------------------------------------------------------------------------


@cache_app.command(
    "export",
    cls=options.Command,
    epilog=_STATUSES.format(
        "FILE holds all chosen records", "damaged records are left out", "nothing is written"
    ),
)
def export(
    paths: Paths,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only records of this namespace: its first characters, as in ls."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only one prefix: the first characters of its key, as in ls."),
    ] = None,
    prefix_text: Annotated[
        str | None,
        typer.Option(help="Only records of this text and of its continuations. Needs --tokenizer."),
    ] = None,
    prefix_tokens: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Like --prefix-text, but token ids.")
    ] = None,
    tokenizer: TokenizerOf = None,
    limit_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Maximum size of the records: the most recently used, with their prefixes."
        ),
    ] = None,
    sign_key: live.SignKey = None,
    from_url: live.From = None,
    prefix: live.PrefixFile = None,
    api_key: live.ApiKey = None,
    tenant: live.TenantName = None,
) -> None:
    """Write records to one file: all, or those of a namespace or a prefix.

    With --from, write the prefix of one prompt that a running server has cached. Only a server with the same weights,
    dtype and tenant can use them. The file holds the prompts as tokens."""
    key_of_file = None if sign_key is None else BundleKey.read("--sign-key", sign_key)
    if from_url is not None:
        [file] = _paths(paths, 1, "--from")
        _refuse_beside(
            "--from",
            {
                "--namespace": namespace,
                "--key": key,
                "--prefix-text": prefix_text,
                "--prefix-tokens": prefix_tokens,
                "--tokenizer": tokenizer,
                "--limit-bytes": limit_bytes,
            },
        )
        if prefix is None:
            raise StartupError("--from needs --prefix FILE, the prompt whose prefix is exported.")
        _refuse_to_overwrite(file)
        live.export(from_url, prefix, file, key_of_file, api_key, tenant)
        print(_SAME_SERVER)
        return
    _refuse_beside("DIR", {"--prefix": prefix, "--tenant": tenant})
    folder, file = _paths(paths, 2, "--from")
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
        loaded = HFTokenizer.load(tokenizer)
        # The text as a completion and as a chat: some tokenizers put a first token before a completion.
        chosen_tokens = [loaded.encode(prefix_text), loaded.encode_chat(prefix_text)]
        if not len(chosen_tokens[1]):
            raise InvalidOption("--prefix-text", prefix_text, "a text of one token at least")
    most_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "--limit-bytes")
    _refuse_to_overwrite(file)

    with _opened(DiskTier.open_as_found(folder)) as tier:
        only = None if namespace is None else _find_namespace(tier, namespace)
        with progress_bar("Reading the index") as progress:
            chosen = _chosen(tier, only, key, chosen_tokens, most_bytes, progress)
        _stop_if_off(tier)
        if not chosen:
            raise StartupError(f"{folder} holds no such record: nothing to export.")
        with progress_bar("Copying records", len(chosen)) as progress:
            written = tier.export(_counting(chosen, progress), file)
    if isinstance(written, NotExported):
        raise StartupError(f"Nothing was exported: {written.reason}")
    if key_of_file is not None:
        live.signed(file, key_of_file)
    print(f"{counted(written.records, 'record')} written to {file}, {in_units(written.archive_bytes)}.")
    print(_SAME_SERVER)
    if written.failures:
        kinds = Counter(failure.miss.kind for failure in written.failures)
        told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        print(
            f"{counted(len(written.failures), 'record')} left out, damaged: {told}. See `rootstock cache verify`."
        )
        raise typer.Exit(EXIT_DAMAGED)


@cache_app.command(
    "import",
    cls=options.Command,
    epilog=_STATUSES.format(
        "the directory has every record of FILE",
        "damaged or refused records are left out",
        "nothing is changed",
    ),
)
def import_(
    paths: Paths,
    disk_budget: Annotated[str | None, options.DISK_BUDGET] = None,
    verify_key: live.VerifyKey = None,
    to_url: live.To = None,
    model: live.ModelName = None,
    api_key: live.ApiKey = None,
    tenant: live.TenantName = None,
    cache_salt: live.CacheSalt = None,
) -> None:
    """Add the records of a file to a directory, after verifying each. A missing directory is created.

    With --to, put the prefix of a file into the cache of a running server. Only a server with the same weights, dtype
    and tenant can use them."""
    key = None if verify_key is None else BundleKey.read("--verify-key", verify_key)
    if to_url is not None:
        [file] = _paths(paths, 1, "--to")
        if key is not None:
            live.refuse_untrusted(file, key)
        if not live.import_(to_url, file, model, api_key, tenant, cache_salt):
            raise typer.Exit(EXIT_DAMAGED)
        return
    _refuse_beside("DIR", {"--model": model, "--tenant": tenant, "--cache-salt": cache_salt})
    folder, file = _paths(paths, 2, "--to")
    if disk_budget is None:
        raise typer.BadParameter("give the server's --disk-budget.", param_hint="--disk-budget")
    if key is not None:
        live.refuse_untrusted(file, key)
    cap_bytes = parse_bytes(disk_budget, "--disk-budget")
    places = read_places(Files(), file)
    if isinstance(places, Unreadable):
        raise StartupError(f"{file} can't be imported: {places.reason}. Nothing was changed.")
    total_bytes = sum(place.stored_bytes for place in places)
    _refuse_to_evict(folder, cap_bytes, total_bytes)

    opened = _opened(DiskTier.open(folder, cap_bytes))
    with opened as tier, progress_bar("Importing records", total_bytes) as progress:
        imported = tier.import_(file, progress)
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
    for outcome, reasons in (("damaged", damaged), ("refused", refused)):
        for reason, count in reasons.most_common():
            print(f"{outcome}\t{count}\t{reason}")
    if tier.counts.indexes_lost:
        print("The index of the directory can't be read: the records stored before are lost.")
    if evicted := tier.room_counts.evicted_records:
        print(f"{counted(evicted, 'record')} evicted to make room, the least recently used.")
    print(_SAME_SERVER)
    if damaged or refused:
        raise typer.Exit(EXIT_DAMAGED)


# -- warm ----------------------------------------------------------------------------------------------------------


@cache_app.command(
    cls=options.Command,
    epilog=_STATUSES.format("every prompt is cached", "some are not", "the file or the server can't be used"),
)
def warm(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines, each the body of a chat or a completion.")
    ],
    url: Annotated[str, typer.Option(metavar="URL", help="Server whose cache gets the prompts.")] = (
        "http://127.0.0.1:8000"
    ),
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", show_default=False, help="API key for --url."),
    ] = None,
) -> None:
    """Cache the prompts of a file in a running server, while it has no requests."""
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    missing = 0
    declared = list(read_warm_file("FILE", file))
    with (
        live.server_client(url, headers) as client,
        progress_bar("Caching prompts", len(declared)) as progress,
    ):
        for one in declared:
            route = one.route.replace("/v1/", "/v1/cache/warm/", 1)
            try:
                response = client.post(route, params={"wait": "true"}, json=one.body)
                told = response.json()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                raise StartupError(f"{url} can't be used: {error or type(error).__name__}") from error
            progress(1)
            if response.status_code == 200 and told["state"] == "cached":
                print(f"{one.place}: {told['tokens']:,} tokens cached")
                continue
            missing += 1
            if response.status_code == 200:
                reason = told["state"].replace("_", " ")
            else:
                reason = told["error"]["message"] if "error" in told else f"status {response.status_code}"
            print(f"{one.place}: not cached: {reason}")
    if missing:
        raise typer.Exit(EXIT_DAMAGED)


def _paths(paths: Sequence[Path], count: int, option: str) -> Sequence[Path]:
    if len(paths) != count:
        raise typer.BadParameter(
            f"give DIR and FILE, or FILE alone with {option} URL.", param_hint="[DIR] FILE"
        )
    return paths


def _refuse_beside(form: str, others: Mapping[str, object]) -> None:
    """Raise StartupError for options of the other form."""
    for option, value in others.items():
        if value is not None:
            raise StartupError(f"{option} does not go with {form}: leave it out.")


def _refuse_to_overwrite(file: Path) -> None:
    """Raise StartupError if the file exists and is not an archive of an earlier export."""
    if os.path.exists(file) and isinstance(found := read_places(Files(), file), Unreadable):
        raise StartupError(f"{file} exists and is not replaced: {found.reason}. Give another name.")


def _refuse_to_evict(folder: Path, cap_bytes: int, total_bytes: int) -> None:
    """Raise StartupError if the budget is too small: a mistyped one must not evict stored or imported records."""
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
        raise InvalidOption("--namespace", beginning, f"the beginning of exactly one of the stored: {listed}")
    return found[0]


def _chosen(
    tier: DiskTier,
    namespace: bytes | None,
    key: str | None,
    tokens: Sequence[Tokens],
    most_bytes: int | None,
    progress: Progress,
) -> list[RecordKey]:
    """Return keys of the records to export, each after the records of its prefix."""

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
                f"Of that prefix, only {stored.reached:,} of {counted(stored.tokens, 'token')} are stored. Give a "
                "shorter one: the last word of a text may have other tokens where the text goes on."
            )
        wanted = stored.path | prefixes.below(stored.at_end)
    if most_bytes is None:
        assert wanted is not None
        return [entry.identity.key for entry in entries() if entry.identity.own in wanted]

    # The most recently used first. Of records used at the same time, those of shorter prefixes first.
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


# -- JSON and words -------------------------------------------------------------------------------------------------


def _prefix_as_json(prefix: Prefix) -> dict[str, Any]:
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


def _namespace_as_json(content: NamespaceContent) -> dict[str, Any]:
    return {
        "namespace": content.namespace.hex(),
        "families": content.families,
        "dtypes": sorted(content.dtypes),
        "records": content.records,
        "bytes": content.stored_bytes,
    }


def _namespace_in_words(content: NamespaceContent) -> str:
    # The dtype of the model and that of K and V, which `Namespace` joins by a colon.
    dtypes = sorted(" and ".join(dict.fromkeys(dtype.split(":"))) for dtype in content.dtypes)
    kept = f"{', '.join(content.families)} in {', '.join(dtypes)}"
    return (
        f"Namespace {content.namespace.hex()[:8]}: {kept}, "
        f"{counted(content.records, 'record')}, {in_units(content.stored_bytes)}."
    )


# -- texts ---------------------------------------------------------------------------------------------------------


def _add_texts(shown: Sequence[Prefix], entries: Iterable[Entry], tokenizer: ModelTokenizer) -> None:
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


# -- all commands --------------------------------------------------------------------------------------------------


@contextmanager
def _opened(tier: DiskTier | Off) -> Iterator[DiskTier]:
    """Close the tier behind the block. Raises StartupError if it could not be opened."""
    if isinstance(tier, Off):
        raise StartupError(tier.reason)
    try:
        yield tier
    finally:
        tier.close()


def _stop_if_off(tier: DiskTier) -> None:
    if isinstance(tier.state, Off):
        raise StartupError(f"The directory could not be read to its end: {tier.state.reason}.")


def _counting(items: Iterable[T], progress: Progress) -> Iterator[T]:
    for item in items:
        yield item
        progress(1)


def _usage(tier: DiskTier) -> Usage:
    try:
        return tier.usage()
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"The directory can't be measured: {error}.") from error
