"""Files of a repository on the Hub that are fetched for each runtime, and the runtime that "auto" finds by them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption, ModelError, ModelUnsupported, ModelWeightsMissing, StartupError
from rootstock.runtime import select
from rootstock.runtime.model_files import locate, names_here
from rootstock.runtime.select import choose_runtime, locate_model

COMMIT = "0123456789abcdef" * 2 + "01234567"
GRAPH = {"openvino_model.xml", "openvino_model.bin"}
SHARDS = {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}
BESIDE = {"README.md", "onnx/model.onnx", "openvino_tokenizer.xml", "pytorch_model.bin"}
TEXT = {"config.json", "tokenizer.json"}
REPOSITORIES = {
    "graph": GRAPH,
    "safetensors": {"model.safetensors"},
    "shards": SHARDS,
    "both": {*GRAPH, "model.safetensors"},
    "both in shards": {*GRAPH, *SHARDS},
    "half a graph": {"openvino_model.xml", "model.safetensors"},
}
INSTALLED = [
    names for count in (1, 2, 3) for names in itertools.combinations(("torch", "mlx", "openvino"), count)
]


class FakeHub:
    """The Hub with one repository, over HTTP, and the snapshot of it on this machine."""

    def __init__(self, cache: Path, names: set[str]) -> None:
        self.snapshot = cache / "models--maker--model" / "snapshots" / COMMIT
        self.names = {*names, *TEXT}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if "/resolve/" in path:
                    content, etag = hub.content(path.rpartition(f"{COMMIT}/")[2]), path
                else:
                    content, etag = json.dumps(hub.listing() if "/tree/" in path else hub.info()).encode(), ""
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", "application/json")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{etag.rpartition("/")[2]}"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def info(self) -> dict[str, Any]:
        return {"id": "maker/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.names]}

    def listing(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(self.content(name)), "oid": name.replace("/", "-")}
            for name in self.names
        ]

    @staticmethod
    def content(name: str) -> bytes:
        weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        return json.dumps({"weight_map": weights} if "index" in name else {}).encode()

    def fetched(self) -> set[str]:
        found = (path for path in self.snapshot.rglob("*") if path.is_file())
        return {str(path.relative_to(self.snapshot)) for path in found} - TEXT

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


Make = Callable[..., FakeHub]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the Hub one with a repository, and this machine one with the given runtimes installed."""
    made: list[FakeHub] = []

    def make(names: set[str], installed: Sequence[str]) -> FakeHub:
        made.append(FakeHub(tmp_path, names))
        address = f"http://127.0.0.1:{made[0].server.server_port}"
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(select, "is_installed", lambda runtime: runtime in installed)
        monkeypatch.setattr(select, "is_apple_silicon", lambda: False)
        return made[0]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(("variant", "fetched"), [("", "a-Q4_K_M.gguf"), (":Q8_0", "sub/a-Q8_0.gguf")])
def test_one_gguf_file_of_a_repository_is_fetched(hub: Make, variant: str, fetched: str) -> None:
    made = hub({"a-Q4_K_M.gguf", "sub/a-Q8_0.gguf", "mmproj-a-f16.gguf", "README.md"}, ["torch"])
    opened: list[Path] = []

    def open_gguf(model: str, files: Sequence[Path]) -> Path:
        opened.extend(files)
        return files[0].parent

    locate(f"maker/model{variant}", with_code=False, progress=lambda stage, done: None, open_gguf=open_gguf)
    assert made.fetched() == {fetched}
    assert [file.name for file in opened] == [Path(fetched).name]


def find(**options: Any) -> Path:
    return locate_model(ModelConfig("maker/model", **options), lambda stage, done: None)


@pytest.mark.parametrize("asked", ["auto", "torch", "mlx", "openvino"])
@pytest.mark.parametrize("installed", INSTALLED, ids="+".join)
@pytest.mark.parametrize("kind", REPOSITORIES)
def test_weights_are_fetched_in_the_format_of_the_runtime(
    hub: Make, kind: str, installed: tuple[str, ...], asked: str
) -> None:
    repository = hub({*REPOSITORIES[kind], *BESIDE}, installed)
    of_torch, of_openvino = REPOSITORIES[kind] - GRAPH, REPOSITORIES[kind] & GRAPH
    others = [name for name in installed if name != "openvino"]
    if asked == "auto":
        takes_graph = "openvino" in installed and (of_openvino == GRAPH)
        refuses = not takes_graph and not (others and of_torch)
    else:
        takes_graph = asked == "openvino"
        refuses = asked not in installed or not (of_openvino if takes_graph else of_torch)
    if refuses and not (takes_graph and asked in installed):
        with pytest.raises(StartupError):
            find(runtime=asked)
        assert not {name for name in repository.fetched() if not name.endswith(".json")}
        return
    directory = find(runtime=asked)
    assert repository.fetched() >= (of_openvino if takes_graph else of_torch)
    unwanted = (of_torch - {"model.safetensors.index.json"} if takes_graph else of_openvino) | BESIDE
    assert not repository.fetched() & unwanted
    # Later choices know only what is on this machine.
    chosen = choose_runtime(asked, names=names_here("maker/model")).runtime
    assert (chosen == "openvino") == takes_graph
    if takes_graph and of_openvino != GRAPH:
        with pytest.raises(ModelWeightsMissing, match=r"there is no openvino_model\.(xml|bin)"):
            select.stored_files(ModelConfig("maker/model", runtime=asked), directory)


@pytest.mark.parametrize(
    ("kind", "installed", "error", "said"),
    [
        (
            "graph",
            ("torch",),
            ModelUnsupported,
            r"--runtime openvino \(pip install 'rootstock\[openvino\]'\)",
        ),
        ("graph", (), InvalidOption, r"must be openvino, .* pip install 'rootstock\[openvino\]'"),
        ("safetensors", ("openvino",), InvalidOption, r"optimum-cli export openvino .*'rootstock\[torch\]'"),
        ("half a graph", ("openvino",), InvalidOption, r"optimum-cli export openvino .*'rootstock\[torch\]'"),
        ("safetensors", (), InvalidOption, "a runtime that is installed"),
    ],
)
def test_a_model_that_no_installed_runtime_reads_is_refused_with_a_remedy(
    hub: Make, kind: str, installed: tuple[str, ...], error: type[Exception], said: str
) -> None:
    repository = hub(REPOSITORIES[kind], installed)
    with pytest.raises(error, match=said):
        find()
    assert repository.fetched() <= {"model.safetensors.index.json"}


@pytest.mark.parametrize("kind", ["graph", "safetensors", "both"])
def test_a_snapshot_is_served_while_the_hub_does_not_answer(hub: Make, kind: str) -> None:
    repository = hub(REPOSITORIES[kind], ("torch", "openvino"))
    assert names_here("maker/model") is None
    first = find()
    repository.close()
    assert find() == first
    chosen = choose_runtime("auto", names=names_here("maker/model")).runtime
    assert chosen == ("torch" if kind == "safetensors" else "openvino")


def test_a_gpu_of_torch_gets_safetensors(hub: Make) -> None:
    repository = hub(REPOSITORIES["both"], ("torch", "openvino"))
    find(device="cuda")
    assert repository.fetched() == {"model.safetensors"}


@pytest.mark.parametrize("asked", ["auto", "torch"])
@pytest.mark.parametrize("kind", REPOSITORIES)
def test_a_directory_is_read_in_the_format_of_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, asked: str
) -> None:
    """Only the names of files count here: their content is checked elsewhere."""
    monkeypatch.setattr(select, "is_installed", lambda runtime: runtime != "mlx")
    monkeypatch.setattr("rootstock.runtime.model_files._headers", lambda model, files: iter(files))
    for name in (*REPOSITORIES[kind], *TEXT):
        (tmp_path / name).write_text(
            '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
        )
    config = ModelConfig(str(tmp_path), runtime=asked)
    if kind == "graph" and asked == "torch":
        with pytest.raises(ModelError, match="--runtime openvino"):
            select.stored_files(config, tmp_path)
        return
    suffixes = {file.suffix for file in select.stored_files(config, tmp_path)}
    takes_graph = asked == "auto" and REPOSITORIES[kind] >= GRAPH
    assert suffixes == ({".xml", ".bin"} if takes_graph else {".safetensors"})
