"""`rootstock cache` on directories that a server left, and on damaged and foreign ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cli.running import Ran, Run
from cli.test_options import VALUES
from rootstock.cache.keys import RecordKind, identify, prefix_digest
from rootstock.cache.types import Tokens
from rootstock.cli.cache import cache_app
from rootstock.tiers.base import MissKind, Record
from rootstock.tiers.disk.files import LOCK_NAME
from tiers.helpers import NAMESPACE, Clock, open_tier, record_of, segment_files
from waiting import HANG_S

CAP_BYTES = 16 * 2**20
BLOCK = 16
SYSTEM = "You are a patient gardener who grafts apple trees. " * 3  # 153 bytes
FIRST = SYSTEM + "Which rootstock suits a small garden, and when is it cut? "
SECOND = SYSTEM + "How deep should it be planted?"


def tokens_of(text: str) -> Tokens:
    """Returns the tokens of `byte_tokenizer`."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Path:
    letters = {chr(byte): byte for byte in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def blocks(tokens: Tokens, first: int = 0, family: str = "full") -> list[Record]:
    """Returns a record for each block from block `first` on. The last block may be filled in part."""
    ends = {start: min(start + BLOCK, len(tokens)) for start in range(first * BLOCK, len(tokens), BLOCK)}
    return [
        record_of(identify(NAMESPACE, family, 4, "float32", RecordKind.BLOCKS, tokens[:end], start), 500)
        for start, end in ends.items()
    ]


def state(tokens: Tokens) -> Record:
    start = (len(tokens) - 1) // BLOCK * BLOCK
    return record_of(identify(NAMESPACE, "state", 2, "float32", RecordKind.STATE, tokens, start), 900)


# Two conversations with one system prompt.
RECORDS = [
    *blocks(tokens_of(FIRST)),
    state(tokens_of(SYSTEM)),
    *blocks(tokens_of(SECOND), len(SYSTEM) // BLOCK),
    state(tokens_of(SECOND)),
]
# More than a budget of 2 MiB can hold.
LARGE_RECORDS = [record_of(blocks(tokens_of(f"{n:016}"))[0].identity, 100_000) for n in range(60)]


def stored(folder: Path, records: Sequence[Record]) -> Path:
    tier = open_tier(folder, CAP_BYTES)
    tier.store(records)
    tier.close()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stores RECORDS in a directory."""
    return stored(tmp_path / "tier", RECORDS)


@pytest.fixture
def cache(rootstock: Run) -> Run:
    """Runs `rootstock cache` and checks its exit status."""

    def run(*arguments: object, status: int = 0) -> Ran:
        ran = rootstock("cache", *arguments)
        assert ran.status == status, (ran.out, ran.err)
        return ran

    return run


def listed(cache: Run, folder: Path, *options: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cache("ls", folder, "--json", *options).out)
    return found


def damage(folder: Path, record: Record) -> None:
    """Flips a bit of the record's payload."""
    payload = b"".join(bytes(view) for view in record.views())
    for path in segment_files(folder):
        content = bytearray(path.read_bytes())
        at = content.find(payload)
        if at >= 0:
            content[at + len(payload) // 2] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError("no segment has the record")


# -- verify ------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_directory_reports_it_and_changes_nothing(folder: Path, cache: Run) -> None:
    def contents() -> dict[Path, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME)
        return {path: path.read_bytes() for path in files}

    before = contents()
    ran = cache("verify", folder)
    assert ran.err == ""
    assert f"{len(RECORDS)} of {len(RECORDS)} records are right" in ran.out
    assert contents() == before


def test_verify_lists_each_damaged_record_and_repair_deletes_it(folder: Path, cache: Run) -> None:
    damage(folder, RECORDS[2])
    damage(folder, RECORDS[-1])
    for _ in range(2):  # without --repair nothing changes
        ran = cache("verify", folder, status=1)
        lines = [line for line in ran.out.splitlines() if line.startswith("damaged\t")]
        assert len(lines) == 2
        assert "checksum\tfull\tpositions 32–47" in lines[0]
        assert f"checksum\tstate\tafter {len(SECOND)} tokens" in lines[1]
    assert "2 damaged records deleted" in cache("verify", folder, "--repair", status=1).out
    ran = cache("verify", folder)
    assert f"{len(RECORDS) - 2} of {len(RECORDS) - 2} records are right" in ran.out
    assert "belong to no record" in ran.out


def test_verify_finds_a_segment_that_is_cut_at_its_end(folder: Path, cache: Run) -> None:
    last = list(segment_files(folder))[-1]
    os.truncate(last, last.stat().st_size - 1)
    assert "damaged\tmissing_bytes\t" in cache("verify", folder, status=1).out


def test_verify_tells_the_size_of_files_of_other_formats_and_programs(folder: Path, cache: Run) -> None:
    (folder / "v0-00000001.segment").write_bytes(bytes(3 * 2**20))
    told = "3.0 MiB are files of other formats or programs (v0-00000001.segment)"
    assert told in cache("verify", folder).out
    assert (folder / "v0-00000001.segment").exists()


def test_a_directory_of_any_size_is_read_without_evicting(tmp_path: Path, cache: Run) -> None:
    folder = stored(tmp_path / "tier", LARGE_RECORDS)
    assert "60 of 60 records" in cache("verify", folder).out
    assert listed(cache, folder)["summary"]["records"] == 60


# -- directories that can't be opened ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_a_directory_that_a_server_uses_is_refused_with_its_process(
    tmp_path: Path, cache: Run, command: str
) -> None:
    tier = open_tier(tmp_path / "tier", CAP_BYTES)
    tier.store(RECORDS)
    ran = cache(command, tmp_path / "tier", status=2)
    assert f"in use by a server or another command (pid {os.getpid()})" in ran.err
    assert "Stop that process first." in ran.err
    assert tier.load(RECORDS[0].identity)


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_a_directory_without_a_cache_is_refused_and_not_changed(
    tmp_path: Path, cache: Run, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "tree.jpg").write_bytes(b"tree")
    (tmp_path / "file").write_bytes(b"file")
    before = sorted(tmp_path.rglob("*"))
    for name in ("empty", "photos", "file", "missing"):
        ran = cache(command, tmp_path / name, status=2)
        assert ran.err.startswith(f"rootstock: {tmp_path / name} is not a directory")
        assert ran.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_the_commands_need_no_tensor_framework(folder: Path) -> None:
    code = (
        "import sys, rootstock.cli.main as cli\n"
        "try: cli.main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for command in ("verify", "ls"):
        subprocess.run(
            [sys.executable, "-c", code, "cache", command, str(folder)], check=True, timeout=HANG_S
        )


# -- ls ----------------------------------------------------------------------------------------------------------


def test_ls_shows_prefixes_with_their_own_and_their_shared_size(tmp_path: Path, cache: Run) -> None:
    clock = Clock()
    tier = open_tier(tmp_path / "tier", CAP_BYTES, clock=clock)
    tier.store(RECORDS)
    clock.now_s += 100
    tier.touch([RECORDS[-1].identity.key])
    tier.close()
    found = listed(cache, tmp_path / "tier")
    first, second = found["prefixes"]
    assert [first["tokens"], second["tokens"]] == [len(SECOND), len(FIRST)]  # the most recently used first
    assert first["key"] == prefix_digest(NAMESPACE, tokens_of(SECOND)).hex()
    assert first["families"] == second["families"] == ["full", "state"]
    assert (first["last_use"], second["last_use"]) == ("1970-01-01T00:18:20Z", "1970-01-01T00:16:40Z")
    assert (first["uses"], second["uses"]) == (1, 0)
    # The state after SYSTEM lies within a block. Both prefixes have it if they share the block before it.
    assert first["shared_bytes"] == second["shared_bytes"] > 500 * (len(SYSTEM) // BLOCK)
    assert [first["checkpoints"], second["checkpoints"]] == [2, 1]
    summary = found["summary"]
    assert summary["records"] == len(RECORDS)
    assert first["own_bytes"] + second["own_bytes"] + first["shared_bytes"] == summary["record_bytes"]
    assert summary["namespaces"][0]["namespace"] == NAMESPACE.digest().hex()
    assert summary["orphans"] == {"records": 0, "bytes": 0}


def test_ls_counts_a_prefix_once_while_its_last_block_grows(tmp_path: Path, cache: Run) -> None:
    text = tokens_of(FIRST)
    grown = [*blocks(text[:40]), *blocks(text[:45], 2), *blocks(text[:70], 2), state(text[:43])]
    (only,) = listed(cache, stored(tmp_path / "tier", grown))["prefixes"]
    assert (only["tokens"], only["checkpoints"], only["shared_bytes"]) == (70, 1, 0)


def test_the_window_blocks_of_a_position_are_one_checkpoint(tmp_path: Path, cache: Run) -> None:
    text = tokens_of(FIRST)
    windows = [blocks(text[:end], first, family="window(24)") for end, first in ((70, 2), (75, 3), (150, 7))]
    folder = stored(tmp_path / "tier", [*blocks(text), *(record for window in windows for record in window)])
    (only,) = listed(cache, folder)["prefixes"]
    assert (only["tokens"], only["families"], only["checkpoints"]) == (len(FIRST), ["full", "window(24)"], 3)


def test_ls_sums_up_records_whose_beginning_is_gone(tmp_path: Path, cache: Run) -> None:
    records = blocks(tokens_of(FIRST))
    folder = stored(tmp_path / "tier", [*records[:3], *records[5:]])
    found = listed(cache, folder)
    (only,) = found["prefixes"]
    assert only["tokens"] == 3 * BLOCK
    assert found["summary"]["orphans"]["records"] == len(records) - 5
    told = cache("ls", folder).out
    assert f"{len(records) - 5} records, " in told
    assert "continue prefixes that are no longer stored" in told


def test_states_and_windows_without_full_attention_need_no_earlier_records(
    tmp_path: Path, cache: Run
) -> None:
    found = listed(cache, stored(tmp_path / "tier", [state(tokens_of(FIRST)), state(tokens_of(SECOND))]))
    assert len(found["prefixes"]) == 2
    assert found["summary"]["orphans"]["records"] == 0


@pytest.mark.parametrize(
    ("dtype", "shown"), [("bfloat16:bfloat16", "bfloat16"), ("float32:int8", "float32 and int8")]
)
def test_ls_shows_the_dtypes_of_the_model_and_the_cache_once(
    tmp_path: Path, cache: Run, dtype: str, shown: str
) -> None:
    identity = identify(NAMESPACE, "full", 4, dtype, RecordKind.BLOCKS, tokens_of(FIRST)[:BLOCK], 0)
    told = cache("ls", stored(tmp_path / "tier", [record_of(identity)])).out
    assert f": full in {shown}, 1 record, " in told


def test_ls_with_a_tokenizer_shows_how_texts_begin_and_end(
    tmp_path: Path, cache: Run, byte_tokenizer: Path
) -> None:
    folder = stored(tmp_path / "tier", [*RECORDS, *blocks(tokens_of("Hello \x1b[31m there"))])
    found = listed(cache, folder, "--tokenizer", byte_tokenizer)
    texts = {prefix["tokens"]: prefix["text"] for prefix in found["prefixes"]}
    assert texts[len(FIRST)].startswith("You are a patient gardener who grafts … ")
    assert texts[len(FIRST)].endswith("small garden, and when is it cut?")
    assert texts[len(SECOND)].endswith("How deep should it be planted?")
    assert texts[17] == "Hello �[31m there"  # no control characters reach the terminal


def test_ls_outside_a_terminal_prints_fields_and_remarks(folder: Path, cache: Run) -> None:
    ran = cache("ls", folder, "--disk-budget", "16MiB", "--limit", 1)
    header, row, *remarks = ran.out.splitlines()
    assert dict(zip(header.split("\t"), row.split("\t"), strict=True))["tokens"] == str(len(FIRST))
    assert all(line.startswith("# ") for line in remarks)
    assert "% of 16.0 MiB" in remarks[0]
    assert "1 of 2 prefixes are shown" in remarks[1]


@pytest.mark.parametrize("columns", [80, 130])
def test_ls_on_a_terminal_is_a_table_with_more_columns_if_it_is_wide(
    folder: Path, cache: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = cache("ls", folder).out.splitlines()
    header, row = (next(line for line in lines if word in line) for word in ("tokens", f"{len(FIRST)}  "))
    shown = ["key", "tokens", "families", "checkpoints", "own", "shared"]
    wide = ["at", "last", "use", "uses", "namespace"] if columns == 130 else ["last", "use"]
    assert re.findall(r"\w+", re.sub(r"\x1b\[\d+m", "", header)) == shown + wide
    assert "…" not in row
    assert not any(line.startswith("#") for line in lines)
    assert lines[-1].startswith("Namespace ")


def test_ls_of_a_directory_without_records_of_this_format_reports_it(tmp_path: Path, cache: Run) -> None:
    folder = stored(tmp_path / "tier", [])
    (folder / "v0-index.sqlite").write_bytes(bytes(5000))
    assert "Nothing is stored" in cache("ls", folder).out


# -- the guide ---------------------------------------------------------------------------------------------------

GUIDE = (Path(__file__).parents[2] / "docs/disk.md").read_text()


def test_the_guide_explains_every_kind_of_miss() -> None:
    assert [kind for kind in MissKind if f"| `{kind}` |" not in GUIDE] == []


def test_the_guide_names_only_options_that_the_commands_have() -> None:
    commands = GUIDE[GUIDE.index("## Looking into a directory") : GUIDE.index("## Moving a directory")]
    moving = GUIDE[GUIDE.index("## Moving a directory") : GUIDE.index("## Clearing")]
    group = typer.main.get_command(cache_app)
    assert isinstance(group, typer.core.TyperGroup)
    known = {
        option for command in group.commands.values() for param in command.params for option in param.opts
    }
    asked = set(re.findall(r"--[a-z-]+[a-z]", commands))
    assert len(asked) >= 5
    assert asked <= known
    of_servers = {f"--{name}" for name in VALUES}
    asked = set(re.findall(r"--[a-z-]+[a-z]", moving))
    assert "--disk-dir" in asked
    assert asked <= known | of_servers
