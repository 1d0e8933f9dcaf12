"""C3: restart. Time to the first token of the 8th turn of a conversation of 8,000 tokens, for a server that has
nothing cached (cold), has just served the seven turns before (warm), or was restarted with its directory (disk).

Each server is a process of its own with an engine on a model of 80 million random weights, in bfloat16 unless asked
otherwise. One model has full attention; in the other, three layers in four keep a recurrent state. A restart is a new
process on a copy of the directory that another one left when it ended. Every server first answers an unrelated short
prompt, so that no time contains torch's first allocations. The states are measured in turn, each round with another
8th message, and a ratio is a median of rounds.

The bar is for the ordinary restart, after which the system still has the files in memory. `disk_dropped` is a further
figure: the files were synced and the system was asked to drop them (a virtual machine's host may still have them).
The model has all cores, as in a server: with fewer, computing takes longer, and loading shows less.

Side checks: in float32 the three states generate the same tokens. In bfloat16 rounding may part them, and a figure is
the share of equal first tokens.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_most, conclude, exactly
from llamas import VOCAB, say, write_hybrid, write_llama

from asking import generate, greedy
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.types import Tokens

SHOW = "C3"
ROUNDS = 4
MOST = 1.3
TURNS = 8
NEW_TOKENS = (900, 950)  # of a message
SYSTEM_TOKENS = 300  # of the first turn's
ANSWER_TOKENS = 88
COMPARED_TOKENS = 8  # generated in each state
POOL_BYTES = 2**30
MODELS: dict[str, Callable[[Path], Path]] = {"dense": write_llama, "hybrid": write_hybrid}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    ttft_s: float
    cached_tokens: int
    load_s: float  # of the loads for it
    loaded_bytes: int
    loads: int  # 0: the engine chose to compute


States = dict[str, list[Answer]]  # state of the server → an answer for each round


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    options.add_argument("--threads", type=int, help="of the model; as many as torch takes unless given")
    options.add_argument("--dtype", default="bfloat16", help="float32 where bfloat16 is emulated")
    given = options.parse_args()
    names = given.models.split(",")
    figures: dict[str, Any] = {
        "threads": given.threads or os.cpu_count(),
        "dtype": given.dtype,
        "rounds": given.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            place = Path(folder) / name
            place.mkdir()
            model = MODELS[name](place / "model")
            found = measure(name, model, place, given.rounds, given.threads, given.dtype)
            figures |= {f"{name}_{k}": v for k, v in found.items()}
            same = float32_tokens_equal(model, place, given.threads)
            say(f"{name}: in float32 the three states generate the same tokens: {same}")
            figures[f"{name}_float32_tokens_equal"] = same
    bars = {f"{name}_disk_over_warm": at_most(MOST) for name in names}
    conclude(SHOW, figures, bars | {f"{name}_float32_tokens_equal": exactly(True) for name in names})


def measure(
    name: str, model: Path, place: Path, rounds: int, threads: int | None, dtype: str
) -> dict[str, Any]:
    left, warm_dir = place / "left", place / "warm"
    with ThreadPoolExecutor() as both:  # neither is measured: they may slow each other down
        ending = both.submit(lambda: converse(Server(model, left, threads, dtype)))
        staying = both.submit(lambda: converse(Server(model, warm_dir, threads, dtype)))
        restarted, served = ending.result(), staying.result()
    stop_s = restarted.server.stop()
    directory_mb = sum(path.stat().st_size for path in left.iterdir()) / 1e6
    say(
        f"{name}: {len(served.history):,} tokens in {TURNS - 1} turns; {directory_mb:.0f} MB written at the end in "
        f"{stop_s:.2f} s"
    )

    states: States = {state: [] for state in ("cold", "warm", "disk", "disk_dropped")}
    prompt_tokens = 0
    for number in range(rounds):
        last = message(100 + number)
        prompt = np.concatenate([restarted.history, last])
        prompt_tokens = len(prompt)
        order = list(states)
        for state in order[number % 4 :] + order[: number % 4]:
            if state == "warm":
                asked = np.concatenate([served.history, last])
                answer = served.server.ask(asked, COMPARED_TOKENS)
            else:
                directory = place / "restart"
                if state != "cold":
                    shutil.copytree(left, directory)
                if state == "disk_dropped":
                    drop(directory)
                server = Server(model, directory, threads, dtype)
                answer = server.ask(prompt, COMPARED_TOKENS)
                server.kill()
                shutil.rmtree(directory)
            states[state].append(answer)
    served.server.kill()
    return report(name, states, prompt_tokens) | {
        "directory_mb": round(directory_mb, 1),
        "written_at_end_s": round(stop_s, 3),
        "histories_equal": bool(np.array_equal(served.history, restarted.history)),
    }


def report(name: str, states: States, prompt_tokens: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"prompt_tokens": prompt_tokens}
    ttft_s = {state: [answer.ttft_s for answer in answers] for state, answers in states.items()}
    for state, times in ttft_s.items():
        figures[f"ttft_{state}_ms"] = round(statistics.median(times) * 1e3, 1)
        figures[f"ttft_{state}_spread_ms"] = [round(min(times) * 1e3, 1), round(max(times) * 1e3, 1)]
        figures[f"cached_tokens_{state}"] = states[state][-1].cached_tokens
    for state in ("disk", "disk_dropped"):
        answers = states[state]
        load_s = statistics.median(answer.load_s for answer in answers)
        loaded = answers[-1].loaded_bytes
        figures |= {
            f"load_{state}_ms": round(load_s * 1e3, 1),
            f"load_{state}_mb": round(loaded / 1e6, 1),
            f"load_{state}_gb_per_s": round(loaded / load_s / 1e9, 3) if load_s else None,
            f"load_{state}_share_of_ttft": round(
                statistics.median(answer.load_s / answer.ttft_s for answer in answers), 3
            ),
            f"loads_{state}": [answer.loads for answer in answers],
        }
    for above, below in (("disk", "warm"), ("disk_dropped", "warm"), ("cold", "disk"), ("cold", "warm")):
        ratios = (a / b for a, b in zip(ttft_s[above], ttft_s[below], strict=True))
        figures[f"{above}_over_{below}"] = round(statistics.median(ratios), 4)
    for state in ("warm", "disk"):
        figures[f"tokens_equal_cold_{state}"] = statistics.mean(
            agreed(a.tokens, b.tokens) / COMPARED_TOKENS
            for a, b in zip(states["cold"], states[state], strict=True)
        )
    say(
        f"{name}: cold {figures['ttft_cold_ms']} ms, warm {figures['ttft_warm_ms']} ms, "
        f"disk {figures['ttft_disk_ms']} ms of which {figures['load_disk_ms']} ms load {figures['load_disk_mb']} MB; "
        f"disk/warm {figures['disk_over_warm']}, cold/disk {figures['cold_over_disk']}; files dropped: "
        f"{figures['ttft_disk_dropped_ms']} ms, disk/warm {figures['disk_dropped_over_warm']}"
    )
    return figures


def float32_tokens_equal(model: Path, place: Path, threads: int | None) -> bool:
    """Compares the third turn of a short conversation in every state."""
    directory = place / "float32"
    server = Server(model, directory, threads, "float32")
    history = message(1)[:400]
    for seed in (2, 3):
        answer = server.ask(history, 16)
        history = np.concatenate([history, np.array(answer.tokens, np.int32), message(seed)[:300]])
    warm = server.ask(history, 24)
    server.stop()
    server = Server(model, directory, threads, "float32")
    disk = server.ask(history, 24)
    cold = server.ask(history, 24, salt="another tenant")
    server.kill()
    assert disk.loads, "nothing was loaded"
    assert not cold.cached_tokens
    return cold.tokens == warm.tokens == disk.tokens


# ---- a conversation


@dataclass
class Conversation:
    server: Server
    history: Tokens


def converse(server: Server) -> Conversation:
    """Plays all turns but the last."""
    history = np.empty(0, np.int32)
    for turn in range(TURNS - 1):
        history = np.concatenate([history, message(turn)])
        answer = server.ask(history, ANSWER_TOKENS)
        history = np.concatenate([history, np.array(answer.tokens, np.int32)])
    return Conversation(server, history)


def message(seed: int) -> Tokens:
    rng = np.random.default_rng([3, seed])
    return rng.integers(64, VOCAB, int(rng.integers(*NEW_TOKENS))).astype(np.int32)


def boundaries(prompt: Tokens) -> tuple[Boundary, ...]:
    """Returns the boundaries of a chat whose template keeps everything: other conversations part from the prompt
    after the system message, and the next turn at its end."""
    ends = {SYSTEM_TOKENS: CheckpointKind.SYSTEM, len(prompt): CheckpointKind.USER}
    return tuple(Boundary(position, kind) for position, kind in ends.items())


# ---- a server: a process of its own


class Server:
    """Server in a process of its own. It is ready, and has answered an unrelated prompt, once it is made."""

    def __init__(self, model: Path, directory: Path, threads: int | None, dtype: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its_end = spawn.Pipe()
        self._process = spawn.Process(
            target=serve, args=(its_end, model, directory, threads, dtype), daemon=True
        )
        self._process.start()
        its_end.close()
        self._pipe.recv()

    def ask(self, prompt: Tokens, tokens: int, salt: str = "") -> Answer:
        self._pipe.send((prompt, tokens, salt))
        answer = self._pipe.recv()
        assert isinstance(answer, Answer)
        return answer

    def stop(self) -> float:
        """Ends the server, which writes blocks that only memory has. Returns the seconds of that."""
        began = time.perf_counter()
        self._pipe.send(None)
        self._pipe.recv()
        took = time.perf_counter() - began
        self._process.join()
        return took

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def serve(pipe: Connection, model: Path, directory: Path, threads: int | None, dtype: str) -> None:
    from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
    from rootstock.engine.build import build_engine

    built = build_engine(
        ModelConfig(str(model), device="cpu", dtype=dtype, threads=threads),
        CacheConfig(budget_bytes=POOL_BYTES),
        EngineConfig(),
        TierConfig(disk_dir=directory),
    )
    with built.engine:
        ask(built.engine, message(10_000), COMPARED_TOKENS, "")
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            pipe.send(ask(built.engine, *asked))
    pipe.send("written")


def ask(engine: Any, prompt: Tokens, tokens: int, salt: str) -> Answer:
    before = engine.stats().tier.counters
    timed = generate(engine, greedy(prompt, tokens, salt=salt, boundaries=boundaries(prompt)))
    after = engine.stats().tier.counters
    return Answer(
        timed.tokens,
        timed.ttft_s,
        timed.cached_tokens,
        after.load_s - before.load_s,
        after.loaded_bytes - before.loaded_bytes,
        after.loads["loaded"] - before.loads["loaded"],
    )


# ---- figures


def drop(directory: Path) -> None:
    """Asks the system to drop the files from its memory."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def agreed(first: Sequence[int], second: Sequence[int]) -> int:
    """Counts the tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


if __name__ == "__main__":
    main()
