"""H5: the time to the first token does not tell a tenant whether another tenant's tail is cached.

Two tenants share a public system prompt. For each probe the victim sends the system prompt with a secret text, or
with another text of the same length; a coin decides. Then the attacker sends the secret text and measures the time to
its first token. The area under the ROC curve (AUC) says how well the times tell both cases apart: 0.5 is a guess. The
control is the same server with one salt for both: there the times must tell, or the test could not see a leak.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import argument_parser, at_least, at_most, conclude

from rootstock.bench.corpus import NOUNS
from rootstock.bench.serving import ServerProcess
from rootstock.bench.tiny_model import ensure_tiny_model

SHOW = "H5"
READY_WITHIN_S = 600.0  # kernels may have to be compiled
SYSTEM_WORDS, SECRET_WORDS = 60, 150
VICTIM, ATTACKER = "key-of-the-victim", "key-of-the-attacker"


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--probes", type=int, default=2_000)
    options.add_argument("--control-probes", type=int, default=400)
    options.add_argument("--seed", type=int, default=5)
    given = options.parse_args()
    rng = random.Random(given.seed)
    system = words(rng, SYSTEM_WORDS)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "public.jsonl"
        shared.write_text(json.dumps({"system": system}))
        keys = Path(folder) / "keys.yaml"
        keys.write_text(f"keys: [{{key: {VICTIM}, tenant: victim}}, {{key: {ATTACKER}, tenant: attacker}}]")
        model = [str(ensure_tiny_model()), "--port", "0", "--kv-budget", "1GiB"]
        with ServerProcess(
            [*model, "--api-keys", str(keys), "--public-prompts", str(shared)], READY_WITHIN_S
        ) as server:
            scoped = probe(server.url, system, given.probes, rng)
        with ServerProcess(model, READY_WITHIN_S) as server:
            control = probe(server.url, system, given.control_probes, rng)
    figures = {f"{name}": value for name, value in scoped.items()}
    figures |= {f"control_{name}": value for name, value in control.items()}
    figures["seconds"] = round(time.perf_counter() - began, 1)
    bars = {
        "distance_from_guess": at_most(0.05),
        "control_auc": at_least(0.9),
        "least_cached_tokens": at_least(SYSTEM_WORDS // 2),
        # The attacker's own tails may begin alike, by a few words.
        "most_cached_tokens": at_most(scoped["least_cached_tokens"] + SECRET_WORDS // 10),
    }
    conclude(SHOW, figures, bars)


def probe(url: str, system: str, probes: int, rng: random.Random) -> dict[str, Any]:
    hits, misses, cached = list[float](), list[float](), list[int]()
    with httpx.Client(base_url=url, timeout=60) as client:
        for key in (VICTIM, ATTACKER) * 3:  # first uses allocate
            ask(client, key, system, words(rng, SECRET_WORDS))
        for _ in range(probes):
            secret, other = words(rng, SECRET_WORDS), words(rng, SECRET_WORDS)
            is_cached = rng.random() < 0.5
            ask(client, VICTIM, system, secret if is_cached else other)
            first_s, cached_tokens = ask(client, ATTACKER, system, secret)
            (hits if is_cached else misses).append(first_s)
            cached.append(cached_tokens)
    auc = area_under_curve(hits, misses)
    return {
        "probes": len(hits) + len(misses),
        "auc": round(auc, 4),
        "distance_from_guess": round(abs(auc - 0.5), 4),
        "median_hit_ms": round(statistics.median(hits) * 1e3, 2),
        "median_miss_ms": round(statistics.median(misses) * 1e3, 2),
        "least_cached_tokens": min(cached),
        "most_cached_tokens": max(cached),
    }


def ask(client: httpx.Client, key: str, system: str, text: str) -> tuple[float, int]:
    """Returns the seconds to the first token of a stream, and the cached tokens that its usage reports."""
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_s, cached = time.perf_counter(), 0.0, 0
    headers = {"Authorization": f"Bearer {key}"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if not first_s and event["choices"] and event["choices"][0]["delta"].get("content") is not None:
                first_s = time.perf_counter() - began
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return first_s or time.perf_counter() - began, cached


def area_under_curve(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Returns the share of pairs of a hit and a miss in which the hit is faster. Equal times count half."""
    ordered = np.sort(np.array(misses))
    slower = len(ordered) - np.searchsorted(ordered, hits, "right")
    equal = np.searchsorted(ordered, hits, "right") - np.searchsorted(ordered, hits, "left")
    return float((slower + equal / 2).mean() / len(ordered))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(NOUNS, k=count))


if __name__ == "__main__":
    main()
