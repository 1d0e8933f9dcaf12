"""P3: the conformance suite on our server, on mistakes put into it, and on the servers of others.

*Ours*: the oracle's families (attention, windows, recurrent states) with a disk tier, restarted by
the suite. No finding.
*Mutations*: the same server with one mistake at a time. Each must be found.
*Peers*: the servers of mlx-lm, llama.cpp, vLLM and SGLang, where options name an interpreter that has them, and ours,
on the same checkpoints: a Llama, and where a server has it a hybrid (three of four layers gated delta nets). All
compute in float32: in bfloat16, another division into chunks gives other tokens. The Llama's weights are numbers of
bfloat16, so that a GGUF file holds them exactly.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, at_least, conclude, exactly
from conformance_mutations import MUTATIONS
from llamas import write_chatting
from peers import (
    PeerProcess,
    PeerUnavailable,
    free_port,
    llama_server,
    rootstock_server,
    sglang_server,
    vllm_server,
)
from safetensors.torch import load_file, save_file

from rootstock.bench.tiny_model import DEMO_SPEC, write_tiny_model
from rootstock.cache.families import Family, row_bytes
from rootstock.config import CacheConfig, EngineConfig, ServerConfig, TierConfig
from rootstock.conformance.report import as_json, line_of, summary
from rootstock.conformance.server import Server
from rootstock.conformance.suite import SuiteOptions, SuiteResult, run_suite
from rootstock.engine.build import assemble
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import StartupError
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window

SHOW = "P3"
BLOCK = 16
CONTEXT = 16_384
KINDS: dict[str, tuple[Family, ...]] = {"full": (FULL,), "hybrid": (FULL, window(64), STATE)}
SIZES = SuiteOptions(prompt_words=80, pressure=8)
LEAST_MUTATIONS = 12
PEER_SIZES = SuiteOptions(prompt_words=250)
PEER_CONTEXT = 8_192
HYBRID: dict[str, Any] = {
    "dtype": torch.float32,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": PEER_CONTEXT,
    "mlp_only_layers": [0, 1, 2],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
}


class OurServer:
    """Our server on the oracle runtime, which can be restarted: `with OurServer(…) as server:`, then `server.url`."""

    def __init__(self, folder: Path, families: Sequence[Family], memory_tokens: int) -> None:
        self._folder, self._families = folder, families
        self._budget = memory_tokens // BLOCK * sum(row_bytes(family, BLOCK) for family in families)
        self._port = free_port()
        self._running = contextlib.ExitStack()

    def __enter__(self) -> OurServer:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def restart(self) -> None:
        self._running.close()
        self._start()

    def _start(self) -> None:
        tokenizer = ByteTokenizer()
        runtime = FakeRuntime(
            tokenizer.vocab_size, CONTEXT, families=self._families, eos_token_ids=tokenizer.eos_token_ids
        )
        cache = CacheConfig(block_size=BLOCK, budget_bytes=self._budget)
        tier = TierConfig(disk_dir=self._folder, disk_budget_bytes=256 << 20)
        made = assemble(runtime, tokenizer, cache, EngineConfig(seed=1, chunk_tokens=128), tier)
        app = create_app(replace(made, defaults=SamplingDefaults()), ServerConfig(aliases=()))
        self._running = contextlib.ExitStack()
        self._running.enter_context(made.engine)
        self._running.enter_context(running(app, made.engine, port=self._port))


def asked(kind: str, options: SuiteOptions, memory_tokens: int = 60_000) -> SuiteResult:
    """Returns what the suite finds on our server."""
    with (
        tempfile.TemporaryDirectory() as folder,
        OurServer(Path(folder), KINDS[kind], memory_tokens) as ours,
        Server(ours.url) as server,
    ):
        return run_suite(server, options, ours.restart)


def found_mutations() -> Iterator[tuple[str, str, str]]:
    """Yields each mistake, the case that found it first, and the finding."""
    for mistake, mutation in MUTATIONS.items():
        began = time.monotonic()
        with mutation.made():
            result = asked(mutation.kind, SIZES, memory_tokens=24_000)
        first = next(iter(result.findings), None)
        told = ("", "") if first is None else (first.case, f"{first.kind}: {first.what}")
        print(f"{mistake:<76} {len(result.findings):3d} {told} {time.monotonic() - began:.0f} s", flush=True)
        yield mistake, *told


def mlx_server(model: Path) -> PeerProcess:
    """Returns mlx-lm's own server."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port)]
    # It has no way to compute a prompt without its cache: with few conversations kept, a few others push one out.
    command += ["--prompt-cache-size", "3"]
    hub = model.parent / "hub"
    hub.mkdir(exist_ok=True)  # its list of models reads it
    # Without compiled functions: on a CPU, MLX would call a C++ compiler for each.
    environment = {"HF_HUB_CACHE": str(hub), "MLX_DISABLE_COMPILE": "1"}
    return PeerProcess(command, port, environment, ready_within_s=120.0)


def save_as(source: Path, target: Path, *dtypes: torch.dtype) -> None:
    """Writes a checkpoint's weights in another dtype: those of `dtypes`, one after the other."""
    file = source / "model.safetensors"
    weights = load_file(file)
    for dtype in dtypes:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(weights, target / file.name, metadata={"format": "pt"})


def in_bfloat16(model: Path) -> Path:
    """Copies a checkpoint whose numbers are those of bfloat16, for the converter to GGUF."""
    copied = model.with_name(f"{model.name} bfloat16")
    shutil.copytree(model, copied)
    save_as(model, copied, torch.bfloat16)
    return copied


def peer_of(name: str, model: Path, kind: str, given: Any) -> PeerProcess:
    """Returns a server of a model. Raises PeerUnavailable."""
    if name == "rootstock":
        return rootstock_server(model, "--dtype", "float32")
    if name == "mlx_lm":
        return mlx_server(model)
    python = getattr(given, f"{name}_python")
    if python is None:
        raise PeerUnavailable(f"neither --{name.replace('_', '-')}-python nor its variable is given")
    if name == "vllm":
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        return vllm_server(python, model, "0-1", PEER_CONTEXT, "float32", *tools)
    if name == "sglang":
        return sglang_server(python, model, model.parent, PEER_CONTEXT)
    if kind != "llama":
        raise PeerUnavailable("no converter of this checkpoint is at hand")
    gguf = model.with_suffix(".gguf")
    if not gguf.exists():
        script = Path(__file__).with_name("llama_gguf.py")
        subprocess.run([python, str(script), str(in_bfloat16(model)), str(gguf), "bfloat16"], check=True)
    return llama_server(python, gguf, threads=2, slots=4, context_tokens=4 * PEER_CONTEXT)


def peers(given: Any) -> dict[str, Any]:
    """Returns what the suite finds on the servers of others, and writes the requests of each finding."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"llama": Path(folder, "llama"), "hybrid": Path(folder, "hybrid")}
        models["llama"].mkdir()
        write_tiny_model(DEMO_SPEC, models["llama"])
        save_as(models["llama"], models["llama"], torch.bfloat16, torch.float32)
        write_chatting(models["hybrid"], "qwen3_next", **HYBRID)
        for kind, model in models.items():
            for name in given.servers.split(","):
                label = f"{name}_{kind}"
                try:
                    with (
                        peer_of(name, model, kind, given) as process,
                        Server(process.url, "default_model" if name == "mlx_lm" else None) as server,
                    ):
                        sizes = replace(PEER_SIZES, prompt_words=given.words)
                        result = run_suite(
                            server, sizes, on_case=lambda done: print(line_of(done), flush=True)
                        )
                except (PeerUnavailable, StartupError) as error:
                    print(f"{label}: not asked: {error}", flush=True)
                    figures[label] = f"not asked: {str(error)[:200]}"
                    continue
                print(label, *summary(result), sep="\n", flush=True)
                figures[label] = dict(Counter(f"{each.case}: {each.kind}" for each in result.findings))
                if given.out is not None:
                    text = json.dumps(as_json(result), indent=1, ensure_ascii=False)
                    (given.out / f"{label}.json").write_text(text)
    return figures


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--parts", default="ours,mutations", help="comma-separated")
    options.add_argument(
        "--servers", default="rootstock,mlx_lm,llama_cpp,vllm,sglang", help="comma-separated"
    )
    for name in ("llama_cpp", "vllm", "sglang"):
        variable = f"ROOTSTOCK_{name.upper()}_PYTHON"
        options.add_argument(f"--{name.replace('_', '-')}-python", default=os.environ.get(variable))
    options.add_argument("--words", type=int, default=PEER_SIZES.prompt_words, help="of a peer's prompt")
    options.add_argument("--out", type=Path, help="directory for the findings' requests")
    given = options.parse_args()
    parts = given.parts.split(",")
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    if "ours" in parts:
        for kind in KINDS:
            result = asked(kind, SIZES)
            print(*(f"{kind}: {line_of(each)}" for each in result.cases), sep="\n", flush=True)
            for finding in result.findings:
                print(f"{kind}: {finding}", flush=True)
            figures |= {
                f"{kind}_answers": sum(each.answers for each in result.cases),
                f"{kind}_compared": result.compared,
                f"{kind}_findings": len(result.findings),
            }
            bars[f"{kind}_findings"] = exactly(0)
    if "mutations" in parts:
        found = list(found_mutations())
        missed = [mistake for mistake, case, _ in found if not case]
        figures |= {"mutations": len(found), "missed": missed}
        bars |= {"mutations": at_least(LEAST_MUTATIONS), "missed": exactly([])}
    if "peers" in parts:
        found_on = peers(given)
        figures |= found_on
        bars |= {label: exactly({}) for label in found_on if label.startswith("rootstock")}
        figures["asked"] = sum(isinstance(found, dict) for found in found_on.values())
        bars["asked"] = at_least(1)
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
