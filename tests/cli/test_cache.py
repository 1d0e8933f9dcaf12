"""`rootstock cache` on directories as a server leaves them, and on those that something happened to."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cli.running import Run
from rootstock.cache.keys import Kind, Namespace, identify, prefix_digest
from rootstock.cache.types import Tokens
from rootstock.cli.cache import cache_app
from rootstock.tiers.base import MissKind, Record
from rootstock.tiers.disk.files import LOCK_NAME
from tiers.helpers import NAMESPACE, Clock, is_right, open_tier, record_of, segment_files
from waiting import HANG_S

CAP_BYTES = 16 * 2**20
BLOCK = 16
OTHER = Namespace("other weights", "float32")
SYSTEM = "You are a patient gardener who grafts apple trees. " * 3  # 153 bytes
FIRST = SYSTEM + "Which rootstock suits a small garden, and when is it cut? "
SECOND = SYSTEM + "How deep should it be planted?"


def tokens_of(text: str) -> Tokens:
    """As `byte_tokenizer` has them."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def byte_tokenizer(directory: Path) -> Path:
    letters = {chr(byte): byte for byte in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def blocks(
    tokens: Tokens, first: int = 0, namespace: Namespace = NAMESPACE, family: str = "full"
) -> list[Record]:
    """A record for each block from block `first` on, the last one as full as it is."""
    return [
        record_of(
            identify(
                namespace, family, 4, "float32", Kind.BLOCKS, tokens[: min(start + BLOCK, len(tokens))], start
            ),
            500,
        )
        for start in range(first * BLOCK, len(tokens), BLOCK)
    ]


def state(tokens: Tokens, namespace: Namespace = NAMESPACE) -> Record:
    start = (len(tokens) - 1) // BLOCK * BLOCK
    return record_of(identify(namespace, "state", 2, "float32", Kind.STATE, tokens, start), 900)


def two_conversations() -> list[Record]:
    shared = len(SYSTEM) // BLOCK
    return [
        *blocks(tokens_of(FIRST)),
        state(tokens_of(SYSTEM)),
        *blocks(tokens_of(SECOND), shared),
        state(tokens_of(SECOND)),
    ]


def stored(folder: Path, records: Sequence[Record], **options: object) -> Path:
    tier = open_tier(folder, CAP_BYTES, **options)
    tier.store(records)
    tier.close()
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def listed(rootstock: Run, folder: Path, *options: object) -> dict[str, object]:
    ran = rootstock("cache", "ls", folder, "--json", *options)
    assert ran.status == 0, ran.err
    found: dict[str, object] = json.loads(ran.out)
    return found


def damage(folder: Path, record: Record) -> None:
    """Flips a bit of its payload."""
    payload = b"".join(bytes(view) for view in record.views())
    for path in segment_files(folder):
        content = path.read_bytes()
        at = content.find(payload)
        if at >= 0:
            flipped = bytearray(content)
            flipped[at + len(payload) // 2] ^= 1
            path.write_bytes(flipped)
            return
    raise AssertionError("no segment has it")


# -- verify ------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_directory_says_so_and_changes_nothing(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    before = contents(folder)
    ran = rootstock("cache", "verify", folder)
    assert (ran.status, ran.err) == (0, "")
    assert f"{len(two_conversations())} of {len(two_conversations())} records are right" in ran.out
    assert {path: raw for path, raw in contents(folder).items() if path.name != LOCK_NAME} == {
        path: raw for path, raw in before.items() if path.name != LOCK_NAME
    }


def test_verify_lists_each_damaged_record_and_repair_strikes_it(tmp_path: Path, rootstock: Run) -> None:
    records = two_conversations()
    folder = stored(tmp_path / "tier", records)
    damage(folder, records[2])
    damage(folder, records[-1])
    for _ in range(2):  # looking changes nothing
        ran = rootstock("cache", "verify", folder)
        assert ran.status == 1
        lines = [line for line in ran.out.splitlines() if line.startswith("damaged\t")]
        assert len(lines) == 2
        assert "checksum\tfull\tpositions 32–47" in lines[0]
        assert f"checksum\tstate\tafter {len(SECOND)} tokens" in lines[1]
    ran = rootstock("cache", "verify", folder, "--repair")
    assert ran.status == 1
    assert "2 damaged records deleted" in ran.out
    ran = rootstock("cache", "verify", folder)
    assert ran.status == 0
    assert f"{len(records) - 2} of {len(records) - 2} records are right" in ran.out
    assert "belong to no record" in ran.out


def test_verify_finds_what_a_segment_lost_at_its_end(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    last = list(segment_files(folder))[-1]
    os.truncate(last, last.stat().st_size - 1)
    ran = rootstock("cache", "verify", folder)
    assert ran.status == 1
    assert "damaged\tmissing_bytes\t" in ran.out


def test_verify_tells_what_other_formats_and_others_take(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    (folder / "v0-00000001.segment").write_bytes(bytes(3 * 2**20))
    ran = rootstock("cache", "verify", folder)
    assert ran.status == 0
    assert "3.0 MiB are files of other formats or programs (v0-00000001.segment)" in ran.out
    assert (folder / "v0-00000001.segment").exists()


def test_a_directory_larger_than_any_cap_is_looked_at_without_evicting(
    tmp_path: Path, rootstock: Run
) -> None:
    records = [record_of(blocks(tokens_of(f"{n:016}"))[0].identity, 100_000) for n in range(60)]
    folder = stored(tmp_path / "tier", records)
    assert "60 of 60 records" in rootstock("cache", "verify", folder).out
    assert listed(rootstock, folder)["summary"]["records"] == 60  # type: ignore[index]


# -- directories that can't be opened ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "ls", "export"])
def test_a_directory_that_a_server_has_is_refused_with_its_process(
    tmp_path: Path, rootstock: Run, command: str
) -> None:
    tier = open_tier(tmp_path / "tier", CAP_BYTES)
    tier.store(two_conversations())
    ran = rootstock(
        "cache", command, tmp_path / "tier", *([tmp_path / "file"] if command == "export" else [])
    )
    assert ran.status == 2
    assert f"in use by a server or another command (pid {os.getpid()})" in ran.err
    assert "Stop that process first." in ran.err
    assert not (tmp_path / "file").exists()
    assert tier.load(two_conversations()[0].identity)


@pytest.mark.parametrize("command", ["verify", "ls", "export"])
def test_what_is_no_cache_directory_is_refused_and_left_as_it_is(
    tmp_path: Path, rootstock: Run, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "tree.jpg").write_bytes(b"tree")
    (tmp_path / "file").write_bytes(b"file")
    before = sorted(tmp_path.rglob("*"))
    for name in ("empty", "photos", "file", "missing"):
        ran = rootstock(
            "cache", command, tmp_path / name, *([tmp_path / "out"] if command == "export" else [])
        )
        assert ran.status == 2
        assert ran.err.startswith(f"rootstock: {tmp_path / name} is not a directory")
        assert ran.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_the_commands_need_no_tensor_framework(tmp_path: Path) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    code = (
        "import sys, rootstock.cli.main as cli\n"
        "try: cli.main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for arguments in (["verify", folder], ["ls", folder], ["export", folder, tmp_path / "file"]):
        subprocess.run(
            [sys.executable, "-c", code, "cache", *map(str, arguments)], check=True, timeout=HANG_S
        )


# -- ls ----------------------------------------------------------------------------------------------------------


def test_ls_shows_prefixes_with_what_is_their_own_and_what_they_share(tmp_path: Path, rootstock: Run) -> None:
    clock = Clock()
    tier = open_tier(tmp_path / "tier", CAP_BYTES, clock=clock)
    records = two_conversations()
    tier.store(records)
    clock.now_s += 100
    tier.touch([records[-1].identity.key])
    tier.close()
    found = listed(rootstock, tmp_path / "tier")
    first, second = found["prefixes"]  # type: ignore[misc]
    assert [first["tokens"], second["tokens"]] == [len(SECOND), len(FIRST)]  # the one used last first
    assert first["key"] == prefix_digest(NAMESPACE, tokens_of(SECOND)).hex()
    assert first["families"] == second["families"] == ["full", "state"]
    assert (first["last_use"], second["last_use"]) == ("1970-01-01T00:18:20Z", "1970-01-01T00:16:40Z")
    assert (first["uses"], second["uses"]) == (1, 0)
    # The state after SYSTEM lies within a block: on both ways if the block before it is theirs alike.
    assert first["shared_bytes"] == second["shared_bytes"] > 500 * (len(SYSTEM) // BLOCK)
    assert [first["checkpoints"], second["checkpoints"]] == [2, 1]
    summary = found["summary"]
    assert summary["records"] == len(records)  # type: ignore[index]
    assert first["own_bytes"] + second["own_bytes"] + first["shared_bytes"] == summary["record_bytes"]  # type: ignore[index]
    assert summary["namespaces"][0]["namespace"] == NAMESPACE.digest().hex()  # type: ignore[index]
    assert summary["orphans"] == {"records": 0, "bytes": 0}  # type: ignore[index]


def test_ls_counts_a_prefix_once_however_its_last_block_grew(tmp_path: Path, rootstock: Run) -> None:
    text = tokens_of(FIRST)
    grown = [*blocks(text[:40]), *blocks(text[:45], 2), *blocks(text[:70], 2), state(text[:43])]
    folder = stored(tmp_path / "tier", grown)
    (only,) = listed(rootstock, folder)["prefixes"]  # type: ignore[misc]
    assert (only["tokens"], only["checkpoints"], only["shared_bytes"]) == (70, 1, 0)


def test_a_windows_tail_is_one_checkpoint_however_many_blocks_it_has(tmp_path: Path, rootstock: Run) -> None:
    text = tokens_of(FIRST)
    tails = [blocks(text[:end], first, family="window(24)") for end, first in ((70, 2), (75, 3), (150, 7))]
    folder = stored(tmp_path / "tier", [*blocks(text), *(record for tail in tails for record in tail)])
    (only,) = listed(rootstock, folder)["prefixes"]  # type: ignore[misc]
    assert (only["tokens"], only["families"], only["checkpoints"]) == (len(FIRST), ["full", "window(24)"], 3)


def test_ls_sums_up_what_continues_records_that_are_gone(tmp_path: Path, rootstock: Run) -> None:
    records = blocks(tokens_of(FIRST))
    folder = stored(tmp_path / "tier", [*records[:3], *records[5:]])
    found = listed(rootstock, folder)
    (only,) = found["prefixes"]  # type: ignore[misc]
    assert only["tokens"] == 3 * BLOCK
    assert found["summary"]["orphans"]["records"] == len(records) - 5  # type: ignore[index]
    assert f"{len(records) - 5} records, " in rootstock("cache", "ls", folder).out
    assert "continue prefixes that are no longer stored" in rootstock("cache", "ls", folder).out


def test_states_and_windows_without_full_attention_need_nothing_before_them(
    tmp_path: Path, rootstock: Run
) -> None:
    folder = stored(tmp_path / "tier", [state(tokens_of(FIRST)), state(tokens_of(SECOND))])
    found = listed(rootstock, folder)
    assert len(found["prefixes"]) == 2  # type: ignore[arg-type]
    assert found["summary"]["orphans"]["records"] == 0  # type: ignore[index]


def test_ls_with_a_tokenizer_shows_how_texts_begin_and_end(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", [*two_conversations(), *blocks(tokens_of("Hello \x1b[31m there"))])
    model = byte_tokenizer(tmp_path / "model")
    found = listed(rootstock, folder, "--tokenizer", model)
    texts = {prefix["tokens"]: prefix["text"] for prefix in found["prefixes"]}  # type: ignore[attr-defined]
    assert texts[len(FIRST)].startswith("You are a patient gardener who grafts … ")
    assert texts[len(FIRST)].endswith("small garden, and when is it cut?")
    assert texts[len(SECOND)].endswith("How deep should it be planted?")
    assert texts[17] == "Hello �[31m there"  # nothing that a terminal would obey


def test_ls_outside_a_terminal_is_lines_of_fields_and_of_remarks(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    ran = rootstock("cache", "ls", folder, "--disk-budget", "16MiB", "--limit", 1)
    header, row, *remarks = ran.out.splitlines()
    assert dict(zip(header.split("\t"), row.split("\t"), strict=True))["tokens"] == str(len(FIRST))
    assert all(line.startswith("# ") for line in remarks)
    assert "% of 16.0 MiB" in remarks[0]
    assert "1 of 2 prefixes are shown" in remarks[1]


@pytest.mark.parametrize("columns", [80, 130])
def test_ls_on_a_terminal_is_a_table_with_more_columns_if_it_is_wide(
    tmp_path: Path, rootstock: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = rootstock("cache", "ls", folder).out.splitlines()
    header, row = (next(line for line in lines if word in line) for word in ("tokens", f"{len(FIRST)}  "))
    shown = ["key", "tokens", "families", "checkpoints", "own", "shared"]
    wide = ["at", "last", "use", "uses", "namespace"] if columns == 130 else ["last", "use"]
    assert re.findall(r"\w+", re.sub(r"\x1b\[\d+m", "", header)) == shown + wide
    assert "…" not in row
    assert not any(line.startswith("#") for line in lines)
    assert lines[-1].startswith("Namespace ")


def test_ls_of_a_directory_with_nothing_of_this_format_says_so(tmp_path: Path, rootstock: Run) -> None:
    stored(tmp_path / "tier", [])
    (tmp_path / "tier" / "v0-index.sqlite").write_bytes(bytes(5000))
    ran = rootstock("cache", "ls", tmp_path / "tier")
    assert ran.status == 0
    assert "Nothing is stored" in ran.out


# -- export and import -------------------------------------------------------------------------------------------


def test_what_was_exported_and_imported_elsewhere_is_loaded_there(tmp_path: Path, rootstock: Run) -> None:
    records = [*two_conversations(), *blocks(tokens_of(FIRST), namespace=OTHER)]
    folder = stored(tmp_path / "tier", records)
    ran = rootstock("cache", "export", folder, tmp_path / "all.rootstock")
    assert ran.status == 0
    assert f"{len(records)} records written" in ran.out
    assert "same weights, dtype and tenant" in ran.out
    imported = tmp_path / "new" / "tier"
    ran = rootstock("cache", "import", imported, tmp_path / "all.rootstock", "--disk-budget", "16MiB")
    assert ran.status == 0, ran.err
    assert f"stored\t{len(records)}\t" in ran.out
    tier = open_tier(imported, CAP_BYTES)
    assert all(is_right(tier.load(record.identity), record) for record in records)
    tier.close()
    ran = rootstock("cache", "import", imported, tmp_path / "all.rootstock", "--disk-budget", "16MiB")
    assert ran.status == 0
    assert f"already there\t{len(records)}\n" in ran.out


def exported_keys(rootstock: Run, folder: Path, *options: object) -> set[bytes]:
    file, there = folder.parent / "chosen.rootstock", folder.parent / "there"
    ran = rootstock("cache", "export", folder, file, *options)
    assert ran.status == 0, ran.err
    assert rootstock("cache", "import", there, file, "--disk-budget", "16MiB").status == 0
    tier = open_tier(there, CAP_BYTES)
    keys = {bytes(entry.identity.key) for entry in tier.entries()}
    tier.close()
    shutil.rmtree(there)
    return keys


def keys_of(records: Sequence[Record]) -> set[bytes]:
    return {bytes(record.identity.key) for record in records}


def test_an_export_takes_a_namespace_or_what_leads_to_a_prefix_and_continues_it(
    tmp_path: Path, rootstock: Run
) -> None:
    mine, others = two_conversations(), blocks(tokens_of("Good morning, how are the pears?"))
    foreign = blocks(tokens_of(FIRST), namespace=OTHER)
    folder = stored(tmp_path / "tier", [*mine, *others, *foreign])
    model = byte_tokenizer(tmp_path / "model")
    other = OTHER.digest().hex()[:8]
    assert exported_keys(rootstock, folder, "--namespace", other) == keys_of(foreign)

    text = ("--tokenizer", model, "--prefix-text")
    assert exported_keys(rootstock, folder, *text, SYSTEM) == keys_of([*mine, *foreign])
    ids = ",".join(map(str, tokens_of(SYSTEM).tolist()))
    assert exported_keys(rootstock, folder, "--prefix-tokens", ids) == keys_of([*mine, *foreign])
    ours = NAMESPACE.digest().hex()
    assert exported_keys(rootstock, folder, "--prefix-tokens", ids, "--namespace", ours) == keys_of(mine)
    # Beyond where they part: what leads there and what continues it, and nothing of the other conversation.
    found = exported_keys(rootstock, folder, *text, SYSTEM + "How", "--namespace", ours)
    second = keys_of([*blocks(tokens_of(SECOND)), state(tokens_of(SYSTEM)), state(tokens_of(SECOND))])
    assert found == second
    key = prefix_digest(NAMESPACE, tokens_of(SECOND)).hex()[:12]
    assert exported_keys(rootstock, folder, "--key", key) == second


def test_an_export_with_a_limit_takes_what_was_used_last_and_all_that_it_continues(
    tmp_path: Path, rootstock: Run
) -> None:
    clock = Clock()
    tier = open_tier(tmp_path / "tier", CAP_BYTES, clock=clock)
    old, new = blocks(tokens_of(FIRST)), blocks(tokens_of("Good morning, how are the pears and the plums?"))
    tier.store([*old, *new])
    clock.now_s += 100
    tier.touch([new[-1].identity.key])  # only its end was: what it continues goes with it
    entry_bytes = max(entry.stored_bytes for entry in tier.entries())
    tier.close()
    limit = entry_bytes * (len(new) + 2)
    found = exported_keys(rootstock, tmp_path / "tier", "--limit-bytes", limit)
    assert keys_of(new) < found
    assert found - keys_of(new) <= keys_of(old[: len(found) - len(new)])


def test_a_prefix_that_is_not_stored_to_its_end_is_said_with_how_far_it_is(
    tmp_path: Path, rootstock: Run
) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    model = byte_tokenizer(tmp_path / "model")
    asked = FIRST + "In winter?"
    ran = rootstock(
        "cache", "export", folder, tmp_path / "file", "--tokenizer", model, "--prefix-text", asked
    )
    assert ran.status == 2
    assert f"only {len(FIRST)} of {len(asked)} tokens are stored" in ran.err
    assert not (tmp_path / "file").exists()


def test_an_export_leaves_damaged_records_out_and_says_so(tmp_path: Path, rootstock: Run) -> None:
    records = two_conversations()
    folder = stored(tmp_path / "tier", records)
    damage(folder, records[1])
    ran = rootstock("cache", "export", folder, tmp_path / "file")
    assert ran.status == 1
    assert f"{len(records) - 1} records written" in ran.out
    assert "1 record left out, damaged: 1 checksum" in ran.out


def test_an_export_replaces_archives_only(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    for _ in range(2):
        assert rootstock("cache", "export", folder, tmp_path / "file").status == 0
    (tmp_path / "letter").write_text("Dear all")
    for path in (tmp_path / "letter", tmp_path, folder / "archive", tmp_path / "none" / "file"):
        ran = rootstock("cache", "export", folder, path)
        assert ran.status == 2, path
        assert str(path) in ran.err
    assert (tmp_path / "letter").read_text() == "Dear all"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prefix-text", "You"], "--tokenizer"),
        (["--prefix-tokens", "1,x"], "--prefix-tokens is '1,x'"),
        (["--prefix-tokens", "1", "--key", "ab"], "give one of them"),
        (["--namespace", "zz"], "--namespace is 'zz'"),
        (["--key", "zz"], "--key is 'zz'"),
        (["--limit-bytes", "many"], "--limit-bytes is 'many'"),
        (["--limit-bytes", "1"], "nothing to export"),
        (["--prefix-text", "You", "--tokenizer", "missing/model/here"], "tokenizer"),
    ],
)
def test_a_choice_that_cannot_be_made_is_a_sentence_and_no_file(
    tmp_path: Path, rootstock: Run, options: list[str], told: str
) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    ran = rootstock("cache", "export", folder, tmp_path / "file", *options)
    assert ran.status == 2
    assert told in ran.err
    assert not (tmp_path / "file").exists()


def test_an_import_of_what_is_no_whole_archive_changes_nothing(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    rootstock("cache", "export", folder, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "letter").write_text("Dear all")
    (tmp_path / "manifest").write_bytes(whole[:-60] + b"?" + whole[-59:])
    for name in ("cut", "letter", "manifest", "missing", "."):
        ran = rootstock("cache", "import", tmp_path / "new", tmp_path / name, "--disk-budget", "16MiB")
        assert ran.status == 2
        assert "Nothing was changed." in ran.err
    assert not (tmp_path / "new").exists()


def test_an_import_stores_the_whole_records_and_tells_the_damaged_ones(
    tmp_path: Path, rootstock: Run
) -> None:
    records = two_conversations()
    folder = stored(tmp_path / "tier", records)
    rootstock("cache", "export", folder, tmp_path / "file")
    content = bytearray((tmp_path / "file").read_bytes())
    content[1000] ^= 1
    (tmp_path / "file").write_bytes(content)
    ran = rootstock("cache", "import", tmp_path / "new", tmp_path / "file", "--disk-budget", "16MiB")
    assert ran.status == 1
    assert f"stored\t{len(records) - 1}\t" in ran.out
    assert "damaged\t1\tchecksum\t" in ran.out


def test_an_import_evicts_nothing_because_of_a_budget_that_is_too_small(
    tmp_path: Path, rootstock: Run
) -> None:
    records = [record_of(blocks(tokens_of(f"{n:016}"))[0].identity, 100_000) for n in range(60)]
    folder = stored(tmp_path / "tier", records)
    small = stored(tmp_path / "small", two_conversations())
    rootstock("cache", "export", folder, tmp_path / "large.rootstock")
    rootstock("cache", "export", small, tmp_path / "small.rootstock")
    for into, file in ((folder, "small"), (small, "large"), (tmp_path / "new", "large")):
        ran = rootstock("cache", "import", into, tmp_path / f"{file}.rootstock", "--disk-budget", "2MiB")
        assert ran.status == 2
        assert "--disk-budget of 2.0 MiB" in ran.err
    assert "60 of 60 records are right" in rootstock("cache", "verify", folder).out
    assert not (tmp_path / "new").exists()


def test_an_import_into_a_directory_in_use_or_of_others_is_refused(tmp_path: Path, rootstock: Run) -> None:
    folder = stored(tmp_path / "tier", two_conversations())
    rootstock("cache", "export", folder, tmp_path / "file")
    tier = open_tier(folder, CAP_BYTES)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "tree.jpg").write_bytes(b"tree")
    for into, told in ((folder, "in use"), (tmp_path / "photos", "was not made by Rootstock")):
        ran = rootstock("cache", "import", into, tmp_path / "file", "--disk-budget", "16MiB")
        assert ran.status == 2
        assert told in ran.err
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == ["tree.jpg"]
    tier.close()


# -- the guide ---------------------------------------------------------------------------------------------------

GUIDE = (Path(__file__).parents[2] / "docs/disk.md").read_text()


def test_the_guide_explains_every_kind_of_miss() -> None:
    assert [kind for kind in MissKind if f"| `{kind}` |" not in GUIDE] == []


def test_the_guide_names_only_options_that_the_commands_have() -> None:
    commands = GUIDE[GUIDE.index("## Looking into a directory") : GUIDE.index("## Privacy")]
    group = typer.main.get_command(cache_app)
    assert isinstance(group, typer.core.TyperGroup)
    known = {
        option for command in group.commands.values() for param in command.params for option in param.opts
    }
    asked = set(re.findall(r"--[a-z-]+[a-z]", commands))
    assert len(asked) >= 9
    assert asked <= known
