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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from rootstock.cache.keys import Identity, Kind
from rootstock.cache.types import Tokens
from rootstock.cli import live_cache as live
from rootstock.cli import options
from rootstock.cli.export_choice import chosen_records, find_namespace, parse_tokens
from rootstock.cli.output import counted, counting, iso_time, print_table, progress_bar
from rootstock.cli.stored_prefixes import (
    add_texts,
    columns_of_prefixes,
    namespace_as_json,
    prefix_as_json,
    summary_in_words,
)
from rootstock.config import parse_bytes
from rootstock.errors import InvalidOption, StartupError
from rootstock.runtime.select import leave_out_torch
from rootstock.server.declared_prompts import read_warm_file
from rootstock.text.tokenizer import HFTokenizer
from rootstock.tiers.base import AlreadyStored, NotStored, Off, Stored
from rootstock.tiers.disk.archive import Unreadable, read_places
from rootstock.tiers.disk.files import LOCK_NAME, Files
from rootstock.tiers.disk.prefixes import Prefixes
from rootstock.tiers.disk.reports import Failure, NotExported
from rootstock.tiers.disk.signature import BundleKey
from rootstock.tiers.disk.space import Budget, Usage, measure
from rootstock.tiers.disk.tier import SEGMENT_BYTES, DiskTier
from rootstock.units import in_units

EXIT_DAMAGED = 1

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
    loaded = None if tokenizer is None else _load_tokenizer(tokenizer)
    with _opened(DiskTier.open_as_found(folder)) as tier:
        with progress_bar("Reading the index") as progress:
            prefixes = Prefixes.of(counting(tier.entries(), progress))
            leaves = prefixes.leaves()
            shown = [prefixes.described(leaf) for leaf in (leaves[:limit] if limit else leaves)]
            if loaded is not None:
                add_texts(shown, tier.entries(), loaded)
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
        "namespaces": [namespace_as_json(content) for content in prefixes.namespaces.values()],
        "orphans": {"records": prefixes.orphans, "bytes": prefixes.orphan_bytes},
        "struck_records": struck,
    }
    now_s = time.time()
    if as_json:
        listed = {"summary": summary, "prefixes": [prefix_as_json(prefix) for prefix in shown]}
        print(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    print_table(columns_of_prefixes(now_s, with_text=loaded is not None), shown)
    mark = "" if sys.stdout.isatty() else "# "
    for line in summary_in_words(summary, prefixes, len(shown), now_s):
        print(f"{mark}{line}")


def _load_tokenizer(model: str) -> HFTokenizer:
    leave_out_torch(())  # no model is loaded
    return HFTokenizer.load(model)


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
        chosen_tokens = [parse_tokens(prefix_tokens)]
    elif prefix_text is not None and tokenizer is not None:
        loaded = _load_tokenizer(tokenizer)
        # The text as a completion and as a chat: some tokenizers put a first token before a completion.
        chosen_tokens = [loaded.encode(prefix_text), loaded.encode_chat(prefix_text)]
        if not len(chosen_tokens[1]):
            raise InvalidOption("--prefix-text", prefix_text, "a text of one token at least")
    most_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "--limit-bytes")
    _refuse_to_overwrite(file)

    with _opened(DiskTier.open_as_found(folder)) as tier:
        only = None if namespace is None else find_namespace(tier, namespace)
        with progress_bar("Reading the index") as progress:
            chosen = chosen_records(tier, only, key, chosen_tokens, most_bytes, progress)
        _stop_if_off(tier)
        if not chosen:
            raise StartupError(f"{folder} holds no such record: nothing to export.")
        with progress_bar("Copying records", len(chosen)) as progress:
            written = tier.export(counting(chosen, progress), file)
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


def _usage(tier: DiskTier) -> Usage:
    try:
        return tier.usage()
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"The directory can't be measured: {error}.") from error
