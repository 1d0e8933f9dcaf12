"""P2: one step ahead: what Python does between two forwards, beside mlx-lm's own loop and beside a CPU's forwards.

*MLX*: milliseconds a token of one greedy answer, by a real engine and by mlx-lm's `generate_step` on the same
weights, and the same of an engine that begins nothing ahead. Llamas of random weights, whose step takes from a few
milliseconds, of which Python has the larger part, to a hundred. The three take turns. Their tokens must be equal.

*Torch*: eight agents stream answers over HTTP from a server in this process. The gap is the share of the time, from
the first token to the last, in which no forward runs. A small model shows it at its worst.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rootstock.openmp import wait_briefly

wait_briefly()  # torch reads it when it is loaded

import torch  # noqa: E402
from common import argument_parser, at_most, conclude, exactly  # noqa: E402
from llamas import MODELS, say, write_chatting, write_streaming_llama  # noqa: E402
from streaming_client import ClientProcess  # noqa: E402

from asking import greedy  # noqa: E402
from rootstock.config import CacheConfig, EngineConfig, ModelConfig  # noqa: E402
from rootstock.engine.build import assemble, build_engine  # noqa: E402
from rootstock.engine.engine import Engine  # noqa: E402
from rootstock.engine.request import Event, TokenEvent  # noqa: E402
from rootstock.server.app import create_app  # noqa: E402
from rootstock.server.http.listen import running  # noqa: E402
from rootstock.testing.byte_tokenizer import ByteTokenizer  # noqa: E402

SHOW = "P2"
# Sizes for MLX: hidden width and layers.
MLX_MODELS = {"6m": (256, 8), "25m": (512, 8), "80m": (640, 13)}
PROMPT_TOKENS, ANSWER_TOKENS = 100, 80
AGENTS = 8
STREAMED_TOKENS = 128


# ------------------------------------------------------------------------------------------------------ MLX


def save_mlx(folder: Path, name: str) -> Path:
    """Saves a Llama in float32 for MLX."""
    from mlx_lm import convert

    width, layers = MLX_MODELS[name]
    own = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 3 * width}
    own |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    fields = MODELS["80m"] | own | {"dtype": torch.float32, "vocab_size": 4096}
    write_chatting(folder / f"{name} torch", "llama", **fields, max_position_embeddings=8192)
    convert(str(folder / f"{name} torch"), str(folder / name), dtype="float32")
    return folder / name


def mlx_figures(folder: Path, name: str, rounds: int) -> tuple[dict[str, Any], int]:
    """Returns the milliseconds a token of each side, and how many answers differ."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model as load_by_mlx_lm

    from rootstock.runtime.mlx.load import load_model

    path = save_mlx(folder, name)
    own = load_by_mlx_lm(path)[0]

    def engine(*, ahead: bool) -> Engine:
        runtime = load_model(ModelConfig(str(path), dtype="float32", runtime="mlx"))
        config = EngineConfig(max_batch=8, idle_work=False, draft_tokens=0, memory_limit_bytes=0)
        made = assemble(runtime, ByteTokenizer(), CacheConfig(budget_bytes=1 << 28), config).engine
        made.scheduler.looks_ahead = ahead
        return made

    def by_engine(engine: Engine) -> Callable[[np.ndarray], tuple[float, list[int]]]:
        def answer(prompt: np.ndarray) -> tuple[float, list[int]]:
            tokens, times = list[int](), list[float]()

            def take(event: Event) -> None:
                if isinstance(event, TokenEvent):
                    tokens.append(event.token)
                    times.append(time.perf_counter())

            engine.submit(greedy(prompt, ANSWER_TOKENS), take)
            while engine.step():
                pass
            return (times[-1] - times[0]) / (len(times) - 1), tokens

        return answer

    def by_mlx_lm(prompt: np.ndarray) -> tuple[float, list[int]]:
        tokens, times = list[int](), list[float]()
        for token, _ in generate_step(mx.array(prompt), own, max_tokens=ANSWER_TOKENS):
            tokens.append(token)
            times.append(time.perf_counter())
        return (times[-1] - times[0]) / (len(times) - 1), tokens

    sides = {
        "ours": by_engine(engine(ahead=True)),
        "not_ahead": by_engine(engine(ahead=False)),
        "mlx_lm": by_mlx_lm,
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    other = 0
    for number in range(rounds + 1):
        prompt = np.random.default_rng(number).integers(300, 4000, PROMPT_TOKENS).astype(np.int32)
        answers = {side: answer(prompt) for side, answer in sides.items()}
        other += answers["ours"][1] != answers["mlx_lm"][1]
        other += answers["not_ahead"][1] != answers["mlx_lm"][1]
        for side, (each_s, _) in answers.items():
            if number:  # memory was taken in the first
                seconds[side].append(each_s)
    figures: dict[str, Any] = {
        f"mlx_{name}_{side}_ms": round(statistics.median(each) * 1e3, 2) for side, each in seconds.items()
    }
    for side in ("ours", "not_ahead"):
        pairs = zip(seconds[side], seconds["mlx_lm"], strict=True)
        figures[f"mlx_{name}_{side}_to_mlx_lm"] = round(statistics.median(a / b for a, b in pairs), 3)
    say(str(figures))
    return figures, other


# ---------------------------------------------------------------------------------------------------- torch


def torch_gap(folder: Path, size: str, rounds: int) -> dict[str, Any]:
    """Returns the share of the time without a forward, while agents stream answers."""
    made = build_engine(
        ModelConfig(str(write_streaming_llama(folder / f"streaming {size}", size)), device="cpu"),
        CacheConfig(budget_bytes=2 * 1024**3),
        EngineConfig(max_batch=AGENTS, idle_work=False),
    )
    engine = made.engine
    spans: list[tuple[float, float]] = []  # of forwards
    own = engine._runtime.forward

    def forward(batch: Any) -> Any:
        began = time.perf_counter()
        try:
            return own(batch)
        finally:
            spans.append((began, time.perf_counter()))

    engine._runtime.forward = forward  # type: ignore[method-assign]
    random = np.random.default_rng(0)
    prompts = random.integers(300, 32_000, (AGENTS, 64)).tolist()
    gaps, steps_ms = list[float](), list[float]()
    with engine, running(create_app(made), engine) as url, ClientProcess(url) as client:
        client.ask(prompts, 8)
        for _ in range(rounds):
            spans.clear()
            client.ask(prompts, STREAMED_TOKENS)
            decodes = spans[2:-1]  # prompts are cached but for a token, and all requests are in
            whole = decodes[-1][1] - decodes[0][0]
            gaps.append(1 - sum(end - began for began, end in decodes) / whole)
            steps_ms.append(whole / len(decodes) * 1e3)
    figures = {
        f"torch_{size}_gap": round(statistics.median(gaps), 4),
        f"torch_{size}_gaps": [round(gap, 4) for gap in gaps],
        f"torch_{size}_step_ms": round(statistics.median(steps_ms), 2),
    }
    say(str(figures))
    return figures


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--parts", default="mlx,torch", help="comma-separated")
    options.add_argument("--mlx-models", default=",".join(MLX_MODELS), help="comma-separated")
    options.add_argument("--torch-models", default="80m,600m", help="comma-separated")
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    parts, figures, bars = given.parts.split(","), dict[str, Any](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "mlx" in parts:
            import mlx.core as mx

            mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
            figures["other_answers"], bars["other_answers"] = 0, exactly(0)
            for name in given.mlx_models.split(","):
                found, other = mlx_figures(folder, name, given.rounds)
                figures |= found
                figures["other_answers"] += other
                bars[f"mlx_{name}_ours_to_mlx_lm"] = at_most(1.05)
        if "torch" in parts:
            for size in given.torch_models.split(","):
                figures |= torch_gap(folder, size, given.rounds)
                bars[f"torch_{size}_gap"] = at_most(0.005)
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
