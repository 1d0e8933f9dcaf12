"""N1: checkpoints that are served as they are stored, for formats × a dense model, a mixture and a hybrid.

    error       logits, in chunks and decodes, against transformers in float32 on the numbers that the producer's own
                library unpacks. In float32 they are equal; in bfloat16 the error is at most the one of transformers
                with these numbers rounded to bfloat16.
    states      a prompt cold, warm, and from the disk tier after a restart gives the same tokens in float32, and the
                cache has it; in bfloat16 rounding may part them, which is a figure
    identities  formats of one model have caches of their own

Weights are stored by compressed-tensors and gguf themselves, and by the definitions of GPTQ, AWQ, FP8 in blocks,
bitsandbytes, MLX and MXFP4 (tests/stored_checkpoints.py, tests/gguf_checkpoints.py).
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, at_most, conclude, exactly
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from asking import generate, greedy, some_tokens
from checkpoints import VOCAB
from gguf_checkpoints import TOKENS, mixed, save_gguf
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import build_engine
from stored_checkpoints import FORMATS, save_mxfp4, save_quantized
from twins.torch_models import load, logit_errors

SHOW = "N1"
MODELS = {
    "dense": ("llama", {"hidden_size": 128, "intermediate_size": 192}),
    "mixture": ("qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 64}),
    "hybrid": ("qwen3_5_text", {"hidden_size": 128, "intermediate_size": 192}),
}
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "F16", "BF16", "Q4_K_M")
_DRAWS = 4
SEED = 1  # of GGUF's models: with others a router's choice is a tie

# Saves a model stored and plain. Returns both, and how many tokens it has.
Save = Callable[[Path], tuple[Path, Path, int]]


def cases() -> Iterator[tuple[str, str, Save]]:
    """Yields the model's kind and the format, and what saves both."""
    for kind, (model_type, sizes) in MODELS.items():
        for format in FORMATS:
            yield (
                kind,
                format,
                lambda place, m=model_type, f=format, s=sizes: (*save_quantized(place, m, f, **s), VOCAB),  # type: ignore[misc]
            )
        for name in GGUF:
            of_name = mixed if name == "Q4_K_M" else lambda tensor, name=name: name
            yield (
                kind,
                f"GGUF {name}",
                lambda place, m=model_type, k=of_name: (*save_gguf(place, m, k, SEED), TOKENS),  # type: ignore[misc]
            )
    yield "mixture", "MXFP4", lambda place: (*save_mxfp4(place), VOCAB)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--only", default="", help="formats whose names contain this")
    given = options.parse_args()
    worst = {"float32": 0.0, "bfloat16": 0.0}
    served: dict[str, set[str]] = {}
    wrong: list[str] = []
    identities: dict[str, set[str]] = {kind: set() for kind in MODELS}
    count = parted = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        for number, (kind, format, save) in enumerate(cases()):
            if given.only not in format:
                continue
            count += 1
            place = Path(folder) / str(number)
            place.mkdir()
            stored, plain, vocab = save(place)
            if stored.is_dir():
                words = {f"w{i}": i for i in range(vocab)}
                tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
                PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(stored)
            errors = {}
            for dtype in worst:
                runtime = load(stored, dtype)
                off, own = logit_errors(runtime, plain, vocab, _DRAWS)
                errors[dtype] = off if dtype == "float32" else off / own
                worst[dtype] = max(worst[dtype], errors[dtype])
                identities[kind].add(runtime.description.weights_fingerprint + dtype)
            identities[kind].add(load(plain, "float32").description.weights_fingerprint + str(number))
            same = {dtype: in_all_states(stored, place / dtype, dtype) for dtype in worst}
            said = f"{kind:<8} {format:<17} float32 {errors['float32']:.1e}, bfloat16 {errors['bfloat16']:.2f} of own"
            print(f"{said}; states {same}", flush=True)
            served.setdefault(format, set()).add(kind)
            wrong += [f"{kind} {format}: {same['float32']}"] if same["float32"] != "equal" else []
            parted += same["bfloat16"] != "equal"
    figures: dict[str, Any] = {
        "cases": count,
        "formats": len(served),
        "formats_of_all_kinds": sum(len(kinds) == len(MODELS) for kinds in served.values()),
        "float32_error": worst["float32"],
        "bfloat16_error_of_own": worst["bfloat16"],
        "states_that_differ": wrong,
        "bfloat16_states_that_part": parted,
        "shared_identities": 3 * count - sum(map(len, identities.values())),
    }
    bars = {
        "formats_of_all_kinds": at_least(12),
        "float32_error": at_most(1e-4),
        "bfloat16_error_of_own": at_most(1.0),
        "states_that_differ": exactly([]),
        "shared_identities": exactly(0),
    }
    conclude(SHOW, figures, bars)


def in_all_states(stored: Path, place: Path, dtype: str) -> str:
    """Asks for a prompt cold, warm, and after a restart. Returns "equal", or what differs."""
    prompt = some_tokens(random.Random(0), 90, 90) % 90 + 3
    answers = {}
    for start in ("first", "restarted"):
        made = build_engine(
            ModelConfig(str(stored), device="cpu", dtype=dtype, threads=1),
            CacheConfig(16, 64 << 20),
            EngineConfig(),
            TierConfig(disk_dir=place),
        )
        with made.engine:
            for state in ("cold", "warm") if start == "first" else ("disk",):
                answers[state] = generate(made.engine, greedy(prompt, 12))
    for state in ("warm", "disk"):
        if answers[state].cached_tokens < len(prompt) // 2:
            return f"{state}: {answers[state].cached_tokens} of {len(prompt)} tokens cached"
        if answers[state].tokens != answers["cold"].tokens:
            return f"{state}: other tokens"
    return "equal"


if __name__ == "__main__":
    main()
