"""`/v1/cache/export` and `/v1/cache/import`: a cached prefix moves to another server, and nothing but that prefix."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from rootstock.cache.families import Family, row_bytes
from rootstock.config import CacheConfig, ServerConfig, TierConfig
from rootstock.engine.build import Assembly, assemble
from rootstock.server.app import create_app
from rootstock.server.listen import running
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, chunked, window
from rootstock.tiers.disk.archive import BUNDLE_TYPE, Manifest, read_manifest
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.signature import SIGNATURE_BYTES, BundleKey, Signer
from server.conftest import GREEDY, Json, Served, assert_error, served_by_oracle, user
from waiting import HANG_S

KEY = b"a secret of both servers"
SIGNED = ServerConfig(aliases=(), bundle_key=KEY)
OPEN = ServerConfig(aliases=(), unsigned_imports=True)
# Its end lies in a chunk of 12 that begins at a block of 8.
TEXT = "Tell me about the library and about its books, at length. " * 4 + "At once."
FAMILIES: dict[str, tuple[Family, ...]] = {
    "full": (FULL,),
    "full+state": (FULL, STATE),
    "window+full": (window(20), FULL),
    "full+window+state": (FULL, window(7), STATE),
    "chunked+full": (chunked(16), FULL),
    "chunks of 12+full": (chunked(12), FULL),
    "state": (STATE,),
}
Serve = Callable[..., Served]


@pytest.fixture
def serve_as() -> Iterator[Serve]:
    with contextlib.ExitStack() as opened:

        def start(server: ServerConfig = SIGNED, **options: Any) -> Served:
            return opened.enter_context(served_by_oracle(server=server, **options))

        yield start


def export(served: Served, text: str = TEXT, route: str = "", **fields: Any) -> bytes:
    body = fields or {"messages": user(text)}
    response = served.client.post(f"/v1/cache/export{route}", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == BUNDLE_TYPE
    return response.content


def import_(served: Served, bundle: bytes, **options: Any) -> httpx.Response:
    headers = {"Content-Type": BUNDLE_TYPE} | options.pop("headers", {})
    return served.client.post("/v1/cache/import", content=bundle, headers=headers, **options)


def asked(served: Served, text: str = TEXT, **fields: Any) -> tuple[str, int]:
    """Returns the answer to a chat, and its cached tokens."""
    answer = served.chat(text, max_tokens=8, **GREEDY, **fields).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


def signed(content: bytes) -> bytes:
    signer = Signer(BundleKey(KEY))
    signer.update(content)
    return content + signer.signature


def unsigned(bundle: bytes) -> bytes:
    return bundle[:-SIGNATURE_BYTES]


def with_manifest(bundle: bytes, change: Callable[[Json], Any]) -> bytes:
    """Returns an unsigned bundle with another manifest, whose checksum is right."""
    content = unsigned(bundle) if bundle.endswith(b"RtStkSig") else bundle
    offset, length, _, magic = struct.unpack("<QQ16s8s", content[-40:])
    manifest = json.loads(content[offset : offset + length])
    manifest = change(manifest) or manifest
    raw = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    footer = struct.pack("<QQ16s8s", offset, len(raw), xxhash.xxh3_128(raw).digest(), magic)
    return content[:offset] + raw + footer


@pytest.mark.parametrize("families", FAMILIES.values(), ids=FAMILIES)
def test_an_imported_prefix_is_a_hit_with_the_same_answer(
    families: Sequence[Family], serve_as: Serve
) -> None:
    one, other = serve_as(families=families), serve_as(families=families)
    first, _ = asked(one)
    asked(one)  # leaves a state before the last token
    again, hit = asked(one)
    told = import_(other, export(one)).json()
    assert told["state"] == "cached"
    assert told["cached_tokens"] == told["tokens"] > 0
    answer, cached = asked(other)
    assert (answer, answer) == (first, again)
    assert cached == hit or families == FAMILIES["chunks of 12+full"]
    other.settled()
    one.settled()


def test_a_prefix_that_no_record_can_hold_is_not_exported(serve_as: Serve) -> None:
    """The chunk in which it ends begins inside a block, and so does every chunk before with a checkpoint."""
    served = serve_as(families=FAMILIES["chunks of 12+full"])
    text = TEXT.removesuffix("At once.")
    asked(served, text)
    assert asked(served, text)[1] == 235, "it is cached"
    refused = served.client.post("/v1/cache/export", json={"messages": user(text)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "prefix_not_cached")


@pytest.mark.parametrize("families", FAMILIES.values(), ids=FAMILIES)
def test_other_continuations_hit_at_earlier_checkpoints(families: Sequence[Family], serve_as: Serve) -> None:
    """A conversation's first turn ends before the second: a prompt that diverges there finds it."""
    one, other = serve_as(families=families), serve_as(families=families)
    asked(one)
    longer = [*user(TEXT), {"role": "assistant", "content": "Yes."}, *user("And the shelves? " * 5)]

    def answered(served: Served, messages: Any) -> tuple[str, int]:
        body = {"messages": messages, "max_tokens": 8, **GREEDY}
        answer = served.client.post("/v1/chat/completions", json=body).json()
        usage = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], usage

    answered(one, longer)
    bundle = export(one, messages=longer)
    assert import_(other, bundle).json()["state"] == "cached"
    diverging = [*longer[:2], *user("And the lamps?")]
    assert answered(other, diverging)[1] > 0
    assert answered(other, longer)[0] == answered(one, longer)[0]
    assert answered(other, diverging)[0] == answered(one, diverging)[0]


@pytest.mark.parametrize(
    "families", [FAMILIES["full"], FAMILIES["full+window+state"]], ids=["full", "hybrid"]
)
def test_a_prefix_moves_in_pieces(
    families: Sequence[Family], serve_as: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootstock.engine.transfer.PIECE_BYTES", 1)  # a block
    one, other = serve_as(families=families), serve_as(families=families)
    asked(one)
    first, _ = asked(one)
    bundle = export(one)
    assert import_(other, bundle).json()["state"] == "cached"
    answer, cached = asked(other)
    assert answer == first
    assert cached > 200
    again = import_(other, bundle).json()  # all of it is there
    assert again["state"] == "cached"
    other.settled()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/completions", {"prompt": TEXT}),
        ("/chat/completions", {"messages": user(TEXT)}),
        ("/messages", {"messages": user(TEXT), "max_tokens": 5}),
        ("/responses", {"input": TEXT}),
    ],
)
def test_each_wire_format_has_a_route(serve_as: Serve, route: str, body: Json) -> None:
    one, other = serve_as(), serve_as()
    body = {"model": one.assembly.description.name, **body}
    assert one.client.post(f"/v1{route}", json=body).status_code == 200
    bundle = export(one, route=route, **body)
    assert import_(other, bundle).json()["cached_tokens"] > 200


def test_a_salt_must_be_named_again(serve_as: Serve) -> None:
    one, other = serve_as(), serve_as()
    asked(one, cache_salt="secret")
    bundle = export(one, messages=user(TEXT), cache_salt="secret")
    assert b"secret" not in bundle
    for salt in ({}, {"cache_salt": "guess"}):
        assert_error(import_(other, bundle, params=salt), 400, "bundle_refused", "another salt")
    assert asked(other, cache_salt="secret")[1] == 0
    other.client.post("/v1/cache/clear", json={})
    assert import_(other, bundle, params={"cache_salt": "secret"}).json()["state"] == "cached"
    assert asked(other)[1] == 0
    assert asked(other, cache_salt="secret")[1] > 200


def test_a_prompt_that_is_not_cached_is_not_exported(serve_as: Serve) -> None:
    served = serve_as()
    response = served.client.post("/v1/cache/export", json={"messages": user(TEXT)})
    assert_error(response, 404, "prefix_not_cached")


# -- signatures ----------------------------------------------------------------------------------------------------


def test_a_server_without_a_key_takes_no_bundles(serve_as: Serve) -> None:
    one, other = serve_as(), serve_as(ServerConfig(aliases=()))
    asked(one)
    assert_error(import_(other, export(one)), 403, "imports_off", "--bundle-key")


def test_unsigned_bundles_are_taken_where_they_are_allowed(serve_as: Serve) -> None:
    one, signing, trusting = serve_as(OPEN), serve_as(), serve_as(OPEN)
    first, _ = asked(one)
    bundle = export(one)
    assert not bundle.endswith(b"RtStkSig")
    assert_error(import_(signing, bundle), 400, "bundle_refused", "no signature")
    assert import_(signing, signed(bundle)).json()["state"] == "cached"
    assert import_(trusting, signed(bundle)).json()["state"] == "cached"  # the signature is not read
    assert asked(trusting) == (first, asked(one)[1])


def test_a_bundle_of_another_key_is_refused(serve_as: Serve) -> None:
    one, other = serve_as(), serve_as(ServerConfig(aliases=(), bundle_key=b"another secret of sixteen"))
    asked(one)
    assert_error(import_(other, export(one)), 400, "bundle_refused", "not of this key")


def test_no_byte_of_a_signed_bundle_can_be_changed(serve_as: Serve) -> None:
    one, other = serve_as(families=(FULL, STATE)), serve_as(families=(FULL, STATE))
    asked(one, "Hello")
    bundle = export(one, "Hello")
    places = {*range(0, len(bundle), len(bundle) // 60), *range(len(bundle) - 90, len(bundle), 3)}
    for place in sorted(places):
        wrong = bytearray(bundle)
        wrong[place] ^= 1
        assert_error(import_(other, bytes(wrong)), 400, "bundle_refused")
    for end in (0, 1, 39, 40, 100, len(bundle) // 2, len(bundle) - 1):
        assert_error(import_(other, bundle[:end]), 400, "bundle_refused")
    assert_error(import_(other, bundle + b"\0"), 400, "bundle_refused")
    assert other.assembly.engine.stats().cache.cached_blocks == 0


# -- hostile bundles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("families", [(FULL,), (FULL, window(7), STATE)], ids=["full", "hybrid"])
def test_a_changed_byte_of_an_unsigned_bundle_is_damage(families: Sequence[Family], serve_as: Serve) -> None:
    one, other = serve_as(OPEN, families=families), serve_as(OPEN, families=families)
    asked(one, "Hello")
    bundle = export(one, "Hello")
    for place in range(0, len(bundle), max(1, len(bundle) // 150)):
        wrong = bytearray(bundle)
        wrong[place] ^= 0x10
        assert_error(import_(other, bytes(wrong)), 400, "bundle_refused")
    for end in range(0, len(bundle), len(bundle) // 20):
        assert_error(import_(other, bundle[:end]), 400, "bundle_refused")
    assert other.assembly.engine.stats().cache.cached_blocks == 0


def _nested(manifest: Json) -> bytes:
    return b"[" * 200_000


HOSTILE: dict[str, Callable[[Json], Any]] = {
    "no object": lambda m: b"7",
    "nested": _nested,
    "no UTF-8": lambda m: b"\xff\xfe",
    "format": lambda m: m.update(format=2),
    "format is a list": lambda m: m.update(format=[1] * 1000),
    "no records": lambda m: m.update(records=[]),
    "records are a number": lambda m: m.update(records=3),
    "no prefix": lambda m: m.pop("prefix"),
    "prefix is text": lambda m: m.update(prefix="x"),
    "no tokens": lambda m: m["prefix"].update(tokens=""),
    "tokens are a number": lambda m: m["prefix"].update(tokens=3),
    "tokens of three bytes": lambda m: m["prefix"].update(tokens="AAAA"),
    "other tokens": lambda m: m["prefix"].update(tokens="AAAAAAAAAAA="),
    "tokens of other vocabularies": lambda m: m["prefix"].update(tokens="////fw==", positions=[1]),
    "no positions": lambda m: m["prefix"].update(positions=[]),
    "positions are text": lambda m: m["prefix"].update(positions="1"),
    "positions in no order": lambda m: m["prefix"].update(positions=[8, 3]),
    "a negative position": lambda m: m["prefix"].update(positions=[-1]),
    "position 0": lambda m: m["prefix"].update(positions=[0]),
    "position true": lambda m: m["prefix"].update(positions=[True]),
    "a position beyond": lambda m: m["prefix"].update(positions=[10**9]),
    "public tokens": lambda m: m["prefix"].update(public_tokens=8),
    "public tokens are text": lambda m: m["prefix"].update(public_tokens="8"),
    "other weights": lambda m: m["prefix"].update(weights="other"),
    "weights are a number": lambda m: m["prefix"].update(weights=7),
    "another dtype": lambda m: m["prefix"].update(kv_dtype="float16:int8"),
    "another RoPE regime": lambda m: m["prefix"].update(rope_regime="yarn"),
    "an adapter": lambda m: m["prefix"].update(adapter="abc"),
    "a record less": lambda m: m["records"].pop(),
    "a record twice": lambda m: m["records"].append(m["records"][-1]),
    "records in another order": lambda m: m["records"].reverse(),
    "a record beyond": lambda m: m["records"][-1].update(stored_bytes=1 << 60),
    "a record of true bytes": lambda m: m["records"][0].update(offset=True),
    "a header beyond": lambda m: m["records"][0].update(header_bytes=1 << 40),
    "a header of no bytes": lambda m: m["records"][0].update(header_bytes=0),
    "a place with more": lambda m: m["records"][0].update(x=1),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused(change: Callable[[Json], Any], hostile: tuple[Served, bytes]) -> None:
    other, bundle = hostile
    assert_error(import_(other, with_manifest(bundle, change)), 400, "bundle_refused", "Nothing was imported")
    assert other.assembly.engine.stats().cache.cached_blocks == 0


@pytest.fixture(scope="module")
def hostile() -> Iterator[tuple[Served, bytes]]:
    """Returns a server, and a bundle of another one."""
    families = (FULL, STATE)
    with (
        served_by_oracle(server=OPEN, families=families) as one,
        served_by_oracle(server=OPEN, families=families) as other,
    ):
        asked(one, "Hello")
        yield other, export(one, "Hello")


def manifest_of(bundle: bytes, folder: Path) -> Manifest:
    (folder / "bundle").write_bytes(bundle)
    with (folder / "bundle").open("rb") as file:
        found = read_manifest(Files(), file.fileno(), len(bundle))
    assert isinstance(found, Manifest)
    return found


def test_rows_of_other_tokens_cannot_be_passed_off(serve_as: Serve, tmp_path: Path) -> None:
    """The records of one prompt under the tokens of another."""
    one, other = serve_as(OPEN), serve_as(OPEN)
    texts = ("Say it to the man. " * 3, "Say it to the dog. " * 3)
    prefixes = []
    for text in texts:
        asked(one, text)
        bundle = export(one, text)
        prefixes.append((bundle, manifest_of(bundle, tmp_path).prefix))
    (first, _), (_, second) = prefixes
    assert second is not None
    wrong = with_manifest(first, lambda m: m.update(prefix=second.as_json()))
    assert_error(import_(other, wrong), 400, "bundle_refused", "other tokens")
    assert asked(other, texts[1]) == (asked(one, texts[1])[0], 0)


def test_a_bundle_of_another_model_or_block_size_is_refused_with_the_reason(serve_as: Serve) -> None:
    one, windows = serve_as(), serve_as(families=(FULL, window(7)))
    asked(one)
    bundle = export(one)
    assert_error(import_(windows, bundle), 400, "bundle_refused", "lacks records")
    asked(windows)
    assert_error(import_(one, export(windows)), 400, "bundle_refused", "layers that the model does not have")


def test_a_bundle_that_is_too_large_is_refused_before_it_is_read(serve_as: Serve) -> None:
    server = ServerConfig(aliases=(), unsigned_imports=True, max_bundle_bytes=5000)
    one, other = serve_as(OPEN), serve_as(server)
    asked(one)
    bundle = export(one)
    assert len(bundle) > 5000
    assert_error(import_(other, bundle), 413, "body_too_large", "--max-bundle")
    parts = (bundle[at : at + 1000] for at in range(0, len(bundle), 1000))  # chunked
    response = other.client.post("/v1/cache/import", content=parts, headers={"Content-Type": BUNDLE_TYPE})
    assert_error(response, 413, "body_too_large", "--max-bundle")
    # Its own exports keep to the bound: they hold the beginning.
    asked(other)
    smaller = export(other)
    assert len(smaller) <= 8000  # with its manifest
    assert 0 < import_(one, smaller).json()["tokens"] < 200


def test_other_content_types_are_refused(serve_as: Serve) -> None:
    served = serve_as(OPEN)
    for headers in (
        {"Content-Type": "application/json"},
        {"Content-Type": "text/plain"},
        {"Content-Encoding": "gzip"},
    ):
        assert_error(import_(served, b"x", headers=headers), 415, "unsupported_media_type")


def test_a_small_cache_takes_the_part_that_fits(serve_as: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.engine.transfer.PIECE_BYTES", 1)
    one, other = serve_as(), serve_as(blocks=36)
    asked(one)
    for _ in range(3):
        other.chat("Something else, which is in use. " * 3, max_tokens=1)
    told = import_(other, export(one)).json()
    assert told["state"] == "no_memory"
    assert 0 < told["cached_tokens"] < told["tokens"]
    answer, cached = asked(other, TEXT[:100])
    assert cached > 0
    assert answer == asked(one, TEXT[:100])[0]
    other.settled()


# -- rights ----------------------------------------------------------------------------------------------------------


def test_bundles_are_for_operators_alone(serve_as: Serve) -> None:
    server = ServerConfig(aliases=(), admin_key="admin", tenant_keys={"key-a": "a"}, bundle_key=KEY)
    one, other = serve_as(server), serve_as(server)
    client, operator = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer admin"}
    named = operator | {"X-Cache-Salt": "a"}
    body = {"messages": user(TEXT)}
    one.client.post("/v1/chat/completions", json=body | {"max_tokens": 2}, headers=client)
    assert_error(one.client.post("/v1/cache/export", json=body, headers=client), 403, "admin_only")
    response = one.client.post("/v1/cache/export", json=body, headers=operator)
    assert_error(response, 404, "prefix_not_cached")  # of no tenant
    bundle = one.client.post("/v1/cache/export", json=body, headers=named).content
    assert_error(import_(other, bundle, headers=client), 403, "admin_only")
    assert_error(import_(other, bundle, headers=operator), 400, "bundle_refused", "another salt")
    assert import_(other, bundle, headers=named).json()["state"] == "cached"
    answer = other.client.post("/v1/chat/completions", json=body | {"max_tokens": 2}, headers=client).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 200


# -- public heads, adapters, tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("families", [(FULL,), (FULL, window(7), STATE)], ids=["full", "hybrid"])
def test_a_public_head_moves_with_its_tail(
    families: Sequence[Family], serve_as: Serve, tmp_path: Path
) -> None:
    head = "Be kind to readers, and short. "
    (tmp_path / "public.jsonl").write_text(json.dumps({"text": head}))
    server = ServerConfig(aliases=(), bundle_key=KEY, public_prompts=tmp_path / "public.jsonl")
    one, other, without = serve_as(server, families=families), serve_as(server, families=families), serve_as()

    def complete(served: Served, text: str, tenant: str) -> tuple[str, int]:
        body = {"prompt": text, "max_tokens": 8, **GREEDY}
        answer = served.client.post("/v1/completions", json=body, headers={"X-Cache-Salt": tenant}).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    text = head + "What is a book? " * 5
    body = {"prompt": text, "max_tokens": 8, **GREEDY}
    first = one.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    bundle = export(one, prompt=text)
    if families == (FULL,):
        assert_error(import_(without, bundle), 400, "bundle_refused", "--public-prompts")
    assert import_(other, bundle).json()["state"] == "cached"
    answer, cached = complete(other, text, "another")  # the head alone
    assert answer == first
    assert cached == len(head)
    answer = other.client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == first
    least = 100 if families == (FULL,) else len(head)  # a state of the whole prompt is one token too long
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= least
    other.settled()


def test_an_adapters_prefix_is_imported_for_the_same_adapter_alone(serve_as: Serve, tmp_path: Path) -> None:
    from checkpoints import tiny_model  # imports torch
    from lora import linears_of, save_adapter

    model = tiny_model("llama")
    for seed, name in enumerate(("a", "b")):
        save_adapter(tmp_path / name, model, linears_of(model, "q_proj"), seed=seed)
    server = ServerConfig(aliases=(), bundle_key=KEY, adapter_directories=(tmp_path,))
    one, other = serve_as(server), serve_as(server)
    for served in (one, other):
        for name in ("a", "b"):
            body = {"lora_name": name, "lora_path": str(tmp_path / name)}
            assert served.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    first, _ = asked(one, model="a")
    bundle = export(one, model="a", messages=user(TEXT))
    for wrong in ({}, {"model": "b"}):
        assert_error(import_(other, bundle, params=wrong), 400, "bundle_refused", "LoRA adapter")
    assert import_(other, bundle, params={"model": "a"}).json()["state"] == "cached"
    assert asked(other)[1] == asked(other, model="b")[1] == 0
    assert asked(other, model="a") == (first, 243)
    assert_error(import_(other, bundle, params={"model": "c"}), 404, "model_not_found")


@contextlib.contextmanager
def served_on_disk(folder: Path, families: Sequence[Family]) -> Iterator[tuple[httpx.Client, Assembly]]:
    tokenizer = ByteTokenizer()
    runtime = FakeRuntime(PADDED_LOGITS, 4096, families=families, eos_token_ids=tokenizer.eos_token_ids)
    budget = 2000 * sum(row_bytes(family, 8) for family in families)
    made = assemble(runtime, tokenizer, CacheConfig(8, budget), tier=TierConfig(disk_dir=folder))
    app = create_app(made, SIGNED)
    with (
        made.engine,
        running(app, made.engine) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield client, made


@pytest.mark.parametrize("families", FAMILIES.values(), ids=FAMILIES)
def test_a_prefix_on_disk_is_exported(families: Sequence[Family], serve_as: Serve, tmp_path: Path) -> None:
    body = {"messages": user(TEXT), "max_tokens": 8, **GREEDY}
    with served_on_disk(tmp_path, families) as (client, _):
        for _ in range(2):
            first = client.post("/v1/chat/completions", json=body).json()["choices"]
    other, third = serve_as(families=families), serve_as(families=families)
    longer = TEXT + "And a word more."
    with served_on_disk(tmp_path, families) as (client, made):  # after a restart, memory is empty
        bundle = client.post("/v1/cache/export", json={"messages": user(TEXT)}).content
        assert made.engine.stats().cache.cached_blocks == 0  # nothing was loaded for it
        client.post("/v1/cache/export", json={"messages": user(longer)})
        told = import_(other, bundle).json()
        assert told["state"] == "cached"
        answer = other.chat(TEXT, max_tokens=8, **GREEDY).json()
        assert answer["choices"] == first
        # A part of the prompt is in memory, and its end on disk.
        client.post("/v1/chat/completions", json=body | {"messages": user(TEXT[:70])})
        both = client.post("/v1/cache/export", json={"messages": user(TEXT)}).content
        assert import_(third, both).json()["state"] == "cached"
        assert third.chat(TEXT, max_tokens=8, **GREEDY).json()["choices"] == first
    other.settled()
    third.settled()


@pytest.mark.parametrize("families", [(FULL,), (FULL, window(7), STATE)], ids=["full", "hybrid"])
def test_imports_and_exports_beside_requests_change_no_answer(
    families: Sequence[Family], serve_as: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports into a cache that requests fill, so that parts are evicted while they arrive."""
    monkeypatch.setattr("rootstock.engine.transfer.PIECE_BYTES", 1)
    one, other = serve_as(families=families), serve_as(families=families, blocks=80)
    texts = [TEXT[:150] + end for end in ("one", "two", "three", "four")]
    expected = {text: asked(one, text)[0] for text in texts}
    bundles = [export(one, text) for text in texts]

    def move(bundle: bytes) -> None:
        with httpx.Client(base_url=other.url, timeout=HANG_S) as client:
            headers = {"Content-Type": BUNDLE_TYPE}
            while (
                done := client.post("/v1/cache/import", content=bundle, headers=headers)
            ).status_code == 429:
                pass
            assert done.status_code == 200, done.text
            client.post("/v1/cache/export", json={"messages": user(texts[0])})

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            moves = [pool.submit(move, bundle) for bundle in bundles]
            for text in texts:
                assert asked(other, text)[0] == expected[text]
            for one_move in moves:
                one_move.result()
    other.settled()
    other.assembly.engine.clear_cache()
    assert other.assembly.engine.stats().cache.cached_blocks == 0


def test_a_real_models_prefix_gives_the_same_answer(checkpoint: Path) -> None:
    from rootstock.config import ModelConfig
    from rootstock.engine.build import build_engine

    body = {"messages": user(TEXT[:120]), "max_tokens": 12, **GREEDY}
    model = ModelConfig(str(checkpoint), device="cpu", dtype="float32", threads=1)
    made = [build_engine(model, CacheConfig(budget_bytes=8 << 20)) for _ in range(2)]
    with contextlib.ExitStack() as opened:
        clients = []
        for each in made:
            opened.enter_context(each.engine)
            url = opened.enter_context(running(create_app(each, SIGNED), each.engine))
            clients.append(opened.enter_context(httpx.Client(base_url=url, timeout=HANG_S)))
        one, other = clients
        first = one.post("/v1/chat/completions", json=body).json()
        bundle = one.post("/v1/cache/export", json={"messages": user(TEXT[:120])}).content
        told = other.post("/v1/cache/import", content=bundle, headers={"Content-Type": BUNDLE_TYPE}).json()
        assert told["state"] == "cached"
        answer = other.post("/v1/chat/completions", json=body).json()
        assert answer["choices"] == first["choices"]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
