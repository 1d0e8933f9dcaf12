"""`rootstock cache`: inspects a directory of the disk tier that no server uses, and warms the cache of a server.

The tier stores records. A user knows prompts: `Prefixes` chains the records into them.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from rootstock.cache.keys import Identity, RecordKind
from rootstock.cli import options
from rootstock.cli.output import counted, counting, iso_time, print_table, progress_bar
from rootstock.cli.server_client import server_client
from rootstock.cli.stored_prefixes import (
    add_texts,
    columns_of_prefixes,
    namespace_as_json,
    prefix_as_json,
    summary_in_words,
)
from rootstock.errors import StartupError
from rootstock.options import parse_bytes
from rootstock.runtime.select import leave_out_torch
from rootstock.server.routes.declared_prompts import read_warm_file
from rootstock.text.tokenizer import HFTokenizer
from rootstock.tiers.base import Off
from rootstock.tiers.disk.prefixes import Prefixes
from rootstock.tiers.disk.reports import Failure
from rootstock.tiers.disk.space import DiskUsage
from rootstock.tiers.disk.tier import DiskTier
from rootstock.units import in_units

EXIT_DAMAGED = 1

_STATUSES = "Exit status 0: {}. 1: {}. 2: {}."

cache_app = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Directory that servers get as --disk-dir.")]
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
        if identity.kind is RecordKind.STATE
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
    disk_budget: Annotated[str | None, options.parameter("disk-budget")] = None,
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
        server_client(url, headers) as client,
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


def _usage(tier: DiskTier) -> DiskUsage:
    try:
        return tier.usage()
    except (OSError, sqlite3.Error) as error:
        raise StartupError(f"The directory can't be measured: {error}.") from error
