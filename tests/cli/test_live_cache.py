"""`rootstock cache export --from` and `import --to` against servers, and signatures of archives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.running import Run
from rootstock.config import ServerConfig
from rootstock.testing.fake_runtime import FULL, STATE
from server.conftest import GREEDY, Served, served_by_oracle, user
from tiers.helpers import open_tier, records

TEXT = "How do trees grow, and why do they shed their leaves? " * 4
KEY = b"a secret of both servers"


@pytest.fixture
def servers() -> Iterator[tuple[Served, Served]]:
    server = ServerConfig(aliases=(), bundle_key=KEY)
    families = (FULL, STATE)
    with (
        served_by_oracle(server=server, families=families) as one,
        served_by_oracle(server=server, families=families) as other,
    ):
        yield one, other


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    (tmp_path / "other key").write_bytes(b"another secret, of nobody here")
    return tmp_path / "key", tmp_path / "other key"


@pytest.mark.parametrize(
    "asked", [user(TEXT), {"messages": user(TEXT)}, {"url": "/v1/messages", "body": {"messages": user(TEXT)}}]
)
def test_a_prefix_moves_between_servers(
    servers: tuple[Served, Served], rootstock: Run, tmp_path: Path, keys: tuple[Path, Path], asked: object
) -> None:
    one, other = servers
    if isinstance(asked, dict) and "url" in asked:
        asked = {**asked, "body": {**asked["body"], "model": "fake", "max_tokens": 5}}
    first = one.chat(TEXT, max_tokens=8, **GREEDY).json()["choices"]
    one.chat(TEXT, max_tokens=8, **GREEDY)
    (tmp_path / "messages.json").write_text(json.dumps(asked))
    out = tmp_path / "prefix.bundle"
    export = ("cache", "export", "--from", f"{one.url}/v1", "--prefix", tmp_path / "messages.json", out)
    ran = rootstock(*export)
    assert ran.status == 0, ran.err
    assert "tokens written to" in ran.out
    assert out.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.glob("*.part")] == []
    for _ in range(2):  # an older bundle is replaced
        assert rootstock(*export, "--sign-key", keys[1]).status == 0
    refused = rootstock("cache", "import", "--to", other.url, out, "--verify-key", keys[0])
    assert (refused.status, refused.out) == (2, "")
    assert "not of this key" in refused.err
    refused = rootstock("cache", "import", "--to", other.url, out)
    assert refused.status == 2
    assert "not of this key" in refused.err
    assert rootstock(*export, "--sign-key", keys[0]).status == 0
    ran = rootstock("cache", "import", "--to", other.url, out, "--verify-key", keys[0])
    assert ran.status == 0, ran.err
    assert "tokens cached" in ran.out
    answer = other.chat(TEXT, max_tokens=8, **GREEDY).json()
    assert answer["choices"] == first
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    one.settled()
    other.settled()


def test_a_bundle_can_be_imported_into_a_directory(
    servers: tuple[Served, Served], rootstock: Run, tmp_path: Path
) -> None:
    one, _ = servers
    one.chat(TEXT, max_tokens=1, **GREEDY)
    (tmp_path / "messages.json").write_text(json.dumps(user(TEXT)))
    out = tmp_path / "prefix.bundle"
    assert (
        rootstock("cache", "export", "--from", one.url, "--prefix", tmp_path / "messages.json", out).status
        == 0
    )
    ran = rootstock("cache", "import", tmp_path / "tier", out, "--disk-budget", "16MiB")
    assert ran.status == 0, ran.err
    assert "stored\t" in ran.out


def test_wrong_uses_are_one_line(servers: tuple[Served, Served], rootstock: Run, tmp_path: Path) -> None:
    one, _ = servers
    prompt, out = tmp_path / "messages.json", tmp_path / "out"
    prompt.write_text(json.dumps(user("not cached")))
    (tmp_path / "wrong").write_text("[")
    (tmp_path / "short").write_text("secret")
    from_one = ("export", "--from", one.url)
    for arguments, said in (
        ((*from_one, "--prefix", prompt, out), "None of this prompt is cached"),
        ((*from_one, out), "--prefix FILE"),
        ((*from_one, "--prefix", prompt, "dir", out), "[DIR] FILE"),
        (("export", out), "[DIR] FILE"),
        ((*from_one, "--prefix", tmp_path / "wrong", out), "--prefix"),
        ((*from_one, "--prefix", tmp_path / "missing", out), "--prefix"),
        ((*from_one, "--prefix", prompt, "--key", "ab", out), "--key does not go with --from"),
        ((*from_one, "--prefix", prompt, out, "--sign-key", tmp_path / "short"), "--sign-key"),
        (("export", "--from", "http://127.0.0.1:1", "--prefix", prompt, out), "can't be used"),
        (("export", "--from", "here", "--prefix", prompt, out), "can't be used"),
        (("export", "--prefix", prompt, "dir", out), "--prefix does not go with DIR"),
        (("import", "--to", one.url, tmp_path / "missing"), "can't be read"),
        (("import", "--to", one.url, prompt), "no signature"),
        (("import", "dir", prompt), "--disk-budget"),
        (("import", "dir", prompt, "--model", "x", "--disk-budget", "1GiB"), "--model does not go with DIR"),
    ):
        done = rootstock("cache", *arguments)
        assert (done.status, done.out) == (2, ""), arguments
        assert said in " ".join(done.err.split()), (arguments, done.err)
        assert not out.exists()


def test_archives_of_directories_are_signed(rootstock: Run, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    tier = open_tier(tmp_path / "tier", 16 << 20)
    tier.store(records(3))
    tier.close()
    out, right, wrong = tmp_path / "all", *keys

    def import_(*options: object) -> int:
        ran = rootstock("cache", "import", tmp_path / "new", out, "--disk-budget", "16MiB", *options)
        return ran.status

    assert rootstock("cache", "export", tmp_path / "tier", out).status == 0
    assert import_("--verify-key", right) == 2
    assert rootstock("cache", "export", tmp_path / "tier", out, "--sign-key", right).status == 0
    assert import_("--verify-key", wrong) == 2
    content = bytearray(out.read_bytes())
    for place in range(0, len(content), len(content) // 40):
        content[place] ^= 1
        out.write_bytes(content)
        assert import_("--verify-key", right) == 2
        content[place] ^= 1
    assert not (tmp_path / "new").exists()
    out.write_bytes(content)
    assert import_("--verify-key", right) == 0
    assert import_() == 0
