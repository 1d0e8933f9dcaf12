"""M1: agents over HTTP, Llamas and a hybrid, against the servers that a user would pick on a CPU.

Agents with one system prompt of 2,048 words (a word is a token), some turns of 16 to 160 new words, 64 tokens out.
All sides have the same weights, tokenizer and chat template; all answers are greedy and have 64 tokens. The weights
are in bfloat16, which OpenVINO's exporter converts to float16.

  ours        `rootstock serve`, defaults but for dtype, threads and the memory of its cache
  vllm        vLLM's build for CPUs with prefix caching: the better one of its threads on all processors, and of one
              processor kept for the server
  openvino    `rootstock serve` again, on a graph that OpenVINO's exporter makes of the same weights
  llama_cpp   llama.cpp's own server with a slot for each agent, on a GGUF file of the same weights (Llamas only)

The ratio to `openvino` tells which of our runtimes is faster: below 1 it is OpenVINO.

The hybrid has the shape of Qwen3-Next: nine of twelve layers are gated delta nets. Its last layer is a mixture of
experts, without which vLLM does not load it.

Options or the environment (ROOTSTOCK_VLLM_PYTHON and so on) name the interpreters of the peers;
bench/setup_peers.py makes them. A missing peer is reported, and misses its bar. Ours is run before and after each
peer, and a ratio is the peer's wall time by the mean of the two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Bar, argument_parser, at_least, conclude
from d4_agents_http import Outcome, Side, as_gguf, compare, of_peer, of_rootstock
from llamas import say, write_chatting, write_chatting_llama
from neighbours import Neighbours
from peers import PeerUnavailable, llama_server, vllm_server

from rootstock.bench.workloads import Sizes, make_workload

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
MODELS: dict[str, Callable[[Path], Path]] = {
    "80m": lambda path: write_chatting_llama("80m", path),
    "600m": lambda path: write_chatting_llama("600m", path),
    "hybrid": lambda path: write_chatting(path, "qwen3_next", **HYBRID),
}
BARS = {("80m", "vllm"): 1.5, ("600m", "vllm"): 1.3, ("hybrid", "vllm"): 2.0, ("80m", "llama_cpp"): 5.0}


def interpreter(peer: str, given: str | None) -> str:
    """Returns the interpreter of a peer that an option or the environment names."""
    if given is None:
        raise PeerUnavailable(f"neither --{peer}-python nor ROOTSTOCK_{peer.upper()}_PYTHON is given")
    return given


def exported(python: str, path: Path) -> Path:
    """Returns a directory with OpenVINO's graph of a model, which it makes once. An export that fails leaves none."""
    graph, partial = path.with_suffix(".openvino"), path.with_suffix(".partial")
    if not graph.exists():
        shutil.rmtree(partial, ignore_errors=True)
        command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "-m", str(path)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerUnavailable(f"it is not exported: {done.stderr.strip().splitlines()[-1]}")
        partial.rename(graph)
    return graph


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    options.add_argument("--agents", type=int, default=8)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--only", default="vllm,llama_cpp,openvino", help="which peers, comma-separated")
    options.add_argument("--vllm-python", default=os.environ.get("ROOTSTOCK_VLLM_PYTHON"))
    options.add_argument("--llama-python", default=os.environ.get("ROOTSTOCK_LLAMA_PYTHON"))
    options.add_argument("--openvino-python", default=os.environ.get("ROOTSTOCK_OPENVINO_PYTHON"))
    given = options.parse_args()
    peers, threads = given.only.split(","), torch.get_num_threads()
    sizes = Sizes(given.agents, given.agents, given.turns, PREFIX_TOKENS, NEW_TOKENS, ANSWER_TOKENS)
    workload = make_workload("agents", 0, sizes)
    longest = PREFIX_TOKENS + given.turns * (NEW_TOKENS[1] + ANSWER_TOKENS + 16) + 64
    figures: dict[str, Any] = {"threads": threads, "agents": given.agents, "turns": given.turns}
    bars: dict[str, Bar] = {}
    neighbours = Neighbours()
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = MODELS[model](Path(folder) / "model")
            say(f"{model}:")

            def ours(path: Path = path) -> Outcome:
                return of_rootstock(path, threads, workload)

            def vllm(bind: str, path: Path = path) -> Outcome:
                python = interpreter("vllm", given.vllm_python)
                return of_peer(vllm_server(python, path, bind, 4 * longest), workload, str(path))

            def llama_cpp(path: Path = path) -> Outcome:
                python = interpreter("llama", given.llama_python)
                gguf = as_gguf(python, path, "bfloat16")
                context = given.agents * -(-longest // 256) * 256
                server = llama_server(python, gguf, threads, given.agents, context)
                return of_peer(server, workload)

            def openvino(path: Path = path) -> Outcome:
                return of_rootstock(
                    exported(interpreter("openvino", given.openvino_python), path), threads, workload
                )

            sides: dict[str, Side] = {}
            if "openvino" in peers:
                sides["openvino"] = openvino
            if "vllm" in peers:
                sides["vllm_bound"] = lambda vllm=vllm: vllm(f"0-{threads - 1}")
                sides["vllm_auto"] = lambda vllm=vllm: vllm("auto")
            if "llama_cpp" in peers and model != "hybrid":
                sides["llama_cpp"] = llama_cpp
            found = compare(ours, sides, given.rounds)
        faster = [
            found[name]
            for name in ("times_faster_than_vllm_bound", "times_faster_than_vllm_auto")
            if name in found
        ]
        if faster:
            found["times_faster_than_vllm"] = min(faster)
        figures |= {f"{model}_{name}": value for name, value in found.items()}
        for peer in peers:
            if (model, peer) in BARS:
                bars[f"{model}_times_faster_than_{peer}"] = at_least(BARS[model, peer])
    figures["ratios"] = sum("_times_faster_than_" in name for name in figures)
    bars["ratios"] = at_least(1)
    figures["others_share"] = neighbours.share()
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
