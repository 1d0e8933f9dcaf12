"""M1: agents over HTTP, Llamas, a hybrid and a mixture, against the servers that a user would pick on a CPU.

Agents with one system prompt of 2,048 words (a word is a token), some turns of 16 to 160 new words, 64 tokens out.
All sides have the same weights, tokenizer and chat template; all answers are greedy and have 64 tokens.

A checkpoint in bfloat16 (80m, 600m, hybrid, mixture):

  ours        `rootstock serve`, defaults but for dtype, threads and the memory of its cache
  vllm        vLLM's build for CPUs with prefix caching: the better one of its threads on all processors, and of one
              processor kept for the server
  openvino    `rootstock serve` again, on the graph that OpenVINO's exporter makes of the same weights in float16
  llama_cpp   llama.cpp's own server with a slot for each agent, on a GGUF file of the same weights (Llamas only)

A graph of OpenVINO in float16, int8 or int4 (80m_fp16, 80m_int8, …):

  ours        `rootstock serve` on the graph, with 8-bit K and V behind quantized weights
  genai       OpenVINO GenAI's continuous batching with prefix cache on the same graph, in process: no HTTP

With 80m_bf16, 80m_q8 and 80m_q4 (600m likewise), `ours` is `rootstock serve` on the checkpoint, for the latter with
`--quantize int8` or `int4`. GenAI has the graph in float16, which it computes in bfloat16, too, or in int8 or int4
with K and V in 8 bits.

The ratio to `openvino` tells which of our runtimes is faster: below 1 it is OpenVINO.

Loads are numbers of agents: 8; 8-warm, where the system prompt is cached before; and 8-busy, where another process
uses all of one core. A server plays all loads one after the other, and no load finds anything of another one.

The hybrid has the shape of Qwen3-Next: nine of twelve layers are gated delta nets. Its last layer is a mixture of
experts, without which vLLM does not load it. The mixture has the shape of Qwen3's, with 4 of 16 experts.

Options or the environment (ROOTSTOCK_VLLM_PYTHON and so on) name the interpreters of the peers;
bench/setup_peers.py makes them. A missing peer is reported, and misses its bar. Ours is run before and after each
peer, and a ratio is the peer's wall time by the mean of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import Bar, argument_parser, at_least, conclude
from d4_agents_http import (
    Load,
    Outcome,
    Side,
    as_gguf,
    busy_core,
    compare,
    joined,
    of_peer,
    of_rootstock,
    outcome_of,
    warming,
)
from llamas import say, write_chatting, write_chatting_llama
from neighbours import Neighbours
from peers import PeerUnavailable, llama_server, vllm_server

from rootstock.bench.workloads import Sizes, Workload, as_text, make_workload

SHOW = "M1"
PREFIX_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 2048, (16, 160), 64
HYBRID: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_value_heads": 12,
    "linear_num_key_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "mlp_only_layers": list(range(11)),
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
MIXTURE: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "80m": lambda path: write_chatting_llama("80m", path),
    "600m": lambda path: write_chatting_llama("600m", path),
    "hybrid": lambda path: write_chatting(path, "qwen3_next", **HYBRID),
    "mixture": lambda path: write_chatting(path, "qwen3_moe", **MIXTURE),
}
LLAMAS, FORMATS = ("80m", "600m"), ("bf16", "q8", "q4", "fp16", "int8", "int4")
# Of the graph that GenAI has, where ours serves the checkpoint.
GRAPHS = {"": "fp16", "bf16": "fp16", "q8": "int8", "q4": "int4"}
ALL = (*MODELS, *(f"{model}_{weights}" for model in LLAMAS for weights in FORMATS))
LLAMA_CPP_LOADS = ("8",)  # it takes ten times as long as the others

# Times faster than a peer, for each model. A ratio to GenAI has a bar for a cached system prompt of its own.
VLLM_BARS = {"80m": 1.5, "600m": 1.3, "hybrid": 2.0, "mixture": 1.3}
LLAMA_CPP_BAR, GENAI_COLD_BAR, GENAI_WARM_BAR = 5.0, 1.5, 1.2
BUSY_BAR, QUIET_SHARE_BAR = (
    1.3,
    0.75,
)  # beside a busy process: times faster than a peer, share of the quiet throughput


def interpreter(peer: str, given: str | None) -> str:
    """Returns the interpreter of a peer that an option or the environment names."""
    if given is None:
        raise PeerUnavailable(f"neither --{peer}-python nor ROOTSTOCK_{peer.upper()}_PYTHON is given")
    return given


def exported(python: str, path: Path, weights: str) -> Path:
    """Returns a directory with OpenVINO's graph of a model, which it makes once. An export that fails leaves none."""
    graph, partial = path.with_suffix(f".{weights}"), path.with_suffix(".partial")
    if not graph.exists():
        shutil.rmtree(partial, ignore_errors=True)
        command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "-m", str(path)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights]
        command += [
            *(("--group-size", "64") if weights == "int4" else ()),
            str(partial),
        ]  # 128 divides not all inputs
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerUnavailable(f"it is not exported: {done.stderr.strip().splitlines()[-1]}")
        partial.rename(graph)
    return graph


def load_of(name: str, turns: int) -> Load:
    """Returns the load of a name, as "8", "8-warm" and "8-busy"."""
    agents, _, state = name.partition("-")
    if state not in ("", "warm", "busy"):
        raise SystemExit(f"There is no load {name}.")
    sizes = Sizes(int(agents), int(agents), turns, PREFIX_TOKENS, NEW_TOKENS, ANSWER_TOKENS)
    return Load(make_workload("agents", 0, sizes), state == "warm", state == "busy")


def of_genai(python: str, graph: Path, threads: int, kv_precision: str, loads: Mapping[str, Load]) -> Any:
    """Returns the outcomes of loads in one process of GenAI."""
    outcomes: dict[str, Outcome] = {}
    for name, load in loads.items():
        asked = [load.workload] if not load.warm else [warming(load.workload), load.workload]
        command = [
            python,
            str(Path(__file__).with_name("genai_agents.py")),
            str(graph),
            str(threads),
            kv_precision,
        ]
        with busy_core() if load.busy else contextlib.nullcontext():
            done = subprocess.run(
                command, input=json.dumps([texts_of(each) for each in asked]), capture_output=True, text=True
            )
        if done.returncode:
            raise PeerUnavailable(done.stderr.strip()[-300:])
        played = json.loads(done.stdout.splitlines()[-1])[-1]
        requests = played["requests"]
        outcomes[name] = outcome_of(
            played["wall_s"],
            [(each["sent"], each["times"]) for each in requests],
            sum(len(each["times"]) for each in requests),
            sum(each["prompt_tokens"] for each in requests),
        )
    return outcomes


def texts_of(workload: Workload) -> list[dict[str, Any]]:
    return [
        {
            "prefix": as_text(each.prefix),
            "turns": [{"new": as_text(turn.new), "answer_tokens": turn.answer_tokens} for turn in each.turns],
        }
        for each in workload.conversations
    ]


class Sides:
    """Sides of one model's comparison, each a function that plays all loads."""

    def __init__(self, given: argparse.Namespace, model: str, path: Path, loads: Mapping[str, Load]) -> None:
        self._given, self._path, self._loads, self._threads = given, path, loads, torch.get_num_threads()
        self._weights = model.partition("_")[2]

    def ours(self) -> Mapping[str, Outcome]:
        if self._weights in ("", "bf16"):
            return of_rootstock(self._path, self._threads, self._loads)
        if self._weights in GRAPHS:
            quantize = GRAPHS[self._weights]
            return of_rootstock(self._path, self._threads, self._loads, "--quantize", quantize)
        kv_dtype = "auto" if self._weights == "fp16" else "int8"
        return of_rootstock(self._graph(), self._threads, self._loads, "--kv-dtype", kv_dtype)

    def peers(self) -> dict[str, Side]:
        asked = self._given.only.split(",")
        sides: dict[str, Side] = {}
        if self._weights:
            return {"genai": self._genai} if "genai" in asked else {}
        if "openvino" in asked:
            sides["openvino"] = lambda: of_rootstock(self._graph(), self._threads, self._loads)
        if "vllm" in asked:
            sides["vllm_bound"] = lambda: self._vllm(f"0-{self._threads - 1}")
            sides["vllm_auto"] = lambda: self._vllm("auto")
        if "llama_cpp" in asked and self._path.name in LLAMAS:
            sides["llama_cpp"] = self._llama_cpp
        return sides

    def _graph(self) -> Path:
        weights = GRAPHS.get(self._weights, self._weights)
        return exported(self._python("openvino"), self._path, weights)

    def _python(self, peer: str) -> str:
        return interpreter(peer, getattr(self._given, f"{peer}_python"))

    def _genai(self) -> Mapping[str, Outcome]:
        kv_precision = "bf16" if self._weights in ("bf16", "fp16") else "u8"
        return of_genai(self._python("openvino"), self._graph(), self._threads, kv_precision, self._loads)

    def _vllm(self, bind: str) -> Mapping[str, Outcome]:
        server = vllm_server(self._python("vllm"), self._path, bind, longest_tokens(self._given.turns))
        return of_peer(server, self._loads, str(self._path))

    def _llama_cpp(self) -> Mapping[str, Outcome]:
        loads = {name: load for name, load in self._loads.items() if name in LLAMA_CPP_LOADS}
        agents = max((load.workload.sizes.at_once for load in loads.values()), default=1)
        context = agents * -(-longest_tokens(self._given.turns) // 256) * 256
        python = self._python("llama")
        server = llama_server(python, as_gguf(python, self._path, "bfloat16"), self._threads, agents, context)
        return of_peer(server, loads)


def longest_tokens(turns: int) -> int:
    """Returns an upper bound of a conversation: prefix, turns, answers, and the template's tokens between them."""
    return PREFIX_TOKENS + turns * (NEW_TOKENS[1] + ANSWER_TOKENS + 16) + 64


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--models", default=",".join(ALL), help="comma-separated")
    options.add_argument("--loads", default="1,4,8,16,8-warm,8-busy", help="comma-separated")
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument(
        "--only", default="vllm,llama_cpp,openvino,genai", help="which peers, comma-separated"
    )
    options.add_argument("--vllm-python", default=os.environ.get("ROOTSTOCK_VLLM_PYTHON"))
    options.add_argument("--llama-python", default=os.environ.get("ROOTSTOCK_LLAMA_PYTHON"))
    options.add_argument("--openvino-python", default=os.environ.get("ROOTSTOCK_OPENVINO_PYTHON"))
    given = options.parse_args()
    loads = {name: load_of(name, given.turns) for name in given.loads.split(",")}
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "turns": given.turns}
    bars: dict[str, Bar] = {}
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            say(f"{model}:")
            name = model.partition("_")[0]
            path = Path(folder) / name
            if not path.exists():
                MODELS[name](path)
            sides = Sides(given, model, path, loads)
            try:
                found = compare(sides.ours, sides.peers(), given.rounds)
            except PeerUnavailable as error:  # no graph to serve
                say(f"{model}: could not be measured: {error}")
                found = {"could_not": str(error)}
            judge(found, loads)
            figures |= {joined(model, name): value for name, value in found.items()}
            bars |= bars_of(model, loads, given.only.split(","))
    figures["others_share"] = neighbours.share()
    conclude(SHOW, figures, bars)


def judge(found: dict[str, Any], loads: Mapping[str, Load]) -> None:
    """Adds ratios to the better one of vLLM's ways, and the shares of the quiet throughput beside a busy process."""
    for load in loads:
        ways = [f"times_faster_than_vllm_{way}_{load}" for way in ("bound", "auto")]
        if faster := [found[way] for way in ways if way in found]:
            found[f"times_faster_than_vllm_{load}"] = min(faster)
        quiet, is_busy, _ = load.partition("-busy")
        if is_busy and f"wall_s_ours_{quiet}" in found:
            share = found[f"wall_s_ours_{quiet}"] / found[f"wall_s_ours_{load}"]
            found[f"share_of_quiet_{load}"] = round(share, 3)


def bars_of(model: str, loads: Mapping[str, Load], asked: list[str]) -> dict[str, Bar]:
    bars: dict[str, Bar] = {}
    for name, load in loads.items():
        faster = {}
        if model not in MODELS:
            faster["genai"] = GENAI_WARM_BAR if load.warm else GENAI_COLD_BAR
        else:
            faster["vllm"] = VLLM_BARS[model]
            if model in LLAMAS and name in LLAMA_CPP_LOADS:
                faster["llama_cpp"] = LLAMA_CPP_BAR
        if load.busy:
            faster = dict.fromkeys(faster, BUSY_BAR)
            if name.partition("-")[0] in loads:
                bars[f"{model}_share_of_quiet_{name}"] = at_least(QUIET_SHARE_BAR)
        for peer in set(faster) & set(asked):
            bars[f"{model}_times_faster_than_{peer}_{name}"] = at_least(faster[peer])
    return bars


if __name__ == "__main__":
    main()
