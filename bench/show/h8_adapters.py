"""H8, the second half of line 4: LoRA adapters on one base, and embeddings.

served     a server with eight adapters of one base: their requests and the base's, all at once over HTTP, have the
           greedy float32 answers of each alone, which are those of transformers with merged weights. PEFT makes and
           merges the adapters where it is installed, else this repository's own code. Steps tell whether they shared
           forwards
survey     all architectures of the twins: an adapter on every linear layer passes the check at load, which
           compares a batch of it and the base with merged weights. `mixed` shares forwards, `apart` has its own
embedded   tiny embedding models: the largest difference from sentence-transformers' own, where it is installed

With `--runtime mlx` the first two run on MLX's CPU backend: mlx-lm makes and merges the adapters, in its own format
and in PEFT's, and the survey has all architectures of mlx-lm, each with an adapter on every layer that mlx-lm adapts.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from common import argument_parser, at_least, at_most, conclude, exactly
from peers import rootstock_server
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from checkpoints import save, save_served
from embedding_models import save_embedding_model
from lora import linears_of, merge, save_adapter
from rootstock.config import ModelConfig
from rootstock.errors import ModelError
from rootstock.runtime.adapter_files import read_adapter
from rootstock.runtime.torch.embedder import load_embedder
from twins.architectures import ARCHITECTURES
from twins.torch_models import load

ADAPTERS = 8
PROMPTS = 3  # of each adapter, and of the base
TOKENS = 24
MLX_ARCHITECTURES = 114  # of mlx-lm, that take adapters on all layers that mlx-lm adapts
WAIT_S = 120.0
TEXT = "The quick brown fox jumps over the lazy dog while it rains. "


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--runtime", choices=("torch", "mlx"), default="torch")
    parser.add_argument("--only", choices=("served", "survey", "embedded"), action="append", default=[])
    parser.add_argument("--models", nargs="*", default=None, help="architectures of the survey")
    options = parser.parse_args()
    on_mlx = options.runtime == "mlx"
    chosen = options.only or ["served", "survey", *([] if on_mlx else ["embedded"])]
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "served" in chosen:
            figures |= served(Path(folder), on_mlx=on_mlx)
            asked = (ADAPTERS + 1) * PROMPTS
            bars |= {
                "equal_to_alone": exactly(asked),
                "equal_to_merged": exactly(asked),
                "different_answers_of_one_prompt": at_least(ADAPTERS),
                "tokens_per_step_together": at_least(4),
            }
        if "survey" in chosen:
            if on_mlx:
                figures |= survey_of_mlx(Path(folder), options.models)
                bars |= {"take_adapters": at_least(MLX_ARCHITECTURES if options.models is None else 1)}
            else:
                names = options.models or list(ARCHITECTURES)
                figures |= survey(Path(folder), names)
                bars |= {"take_adapters": exactly(len(names))}
        if "embedded" in chosen:
            figures |= embedded(Path(folder))
            bars |= {"embedding_difference": at_most(2e-5)}
    conclude("H8 on MLX" if on_mlx else "H8", figures, bars)


# ---- eight adapters over HTTP


def served(folder: Path, *, on_mlx: bool) -> dict[str, Any]:
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    prompts = [TEXT * 3 + str(number) for number in range(PROMPTS)]
    cases = [(name, prompt) for prompt in prompts for name in ("base", *names)]
    base, answer_of = (made_for_mlx if on_mlx else made_for_torch)(folder, names)
    merged = {case: answer_of(*case) for case in cases}
    options = ["--dtype", "float32", "--served-model-name", "base"]
    options += [f"--adapter={name}={folder / name}" for name in names]
    options += ["--runtime", "mlx", "--kv-budget", "64MiB"] if on_mlx else []
    with rootstock_server(base, *options) as process:
        client = httpx.Client(base_url=process.url, timeout=WAIT_S)
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
        alone = {case: ask(client, *case) for case in cases}
        client.post("/v1/cache/clear", json={})
        before = client.get("/v1/cache/stats").json()["counters"]
        together: dict[tuple[str, str], str] = {}

        def run(case: tuple[str, str]) -> None:
            together[case] = ask(client, *case)

        threads = [threading.Thread(target=run, args=(case,)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = client.get("/v1/cache/stats").json()["counters"]
    steps = after["steps"] - before["steps"]
    return {
        "oracle": "mlx-lm" if on_mlx else "PEFT" if has_peft() else "our own merge",
        "listed_models": len(listed),
        "equal_to_alone": sum(together.get(case) == alone[case] for case in cases),
        "equal_to_merged": sum(alone[case] == merged[case] for case in cases),
        "different_answers_of_one_prompt": min(len({alone[n, p] for n in ("base", *names)}) for p in prompts),
        "tokens_per_step_together": round((after["sampled_tokens"] - before["sampled_tokens"]) / steps, 2),
    }


Made = tuple[Path, Callable[[str, str], str]]
"""A checkpoint, and a function that returns the answer of its model, or of an adapter, to a prompt."""


def made_for_torch(folder: Path, names: Sequence[str]) -> Made:
    base = save_served(folder / "base")
    models = {"base": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()}
    for number, name in enumerate(names):
        models[name] = made_and_merged(base, folder / name, number)
    tokenizer = AutoTokenizer.from_pretrained(base)
    return base, lambda name, prompt: greedy(models[name], tokenizer, prompt)


def made_for_mlx(folder: Path, names: Sequence[str]) -> Made:
    """Saves adapters, each of another kind, two of them in PEFT's format."""
    os.environ["MLX_DISABLE_COMPILE"] = "1"  # on a CPU, MLX calls a C++ compiler for each function
    import mlx_lora
    from mlx_checkpoints import save_mlx_checkpoint

    base = save_mlx_checkpoint(folder / "base", "llama")
    models = {"base": mlx_lora.own_model(base)}
    layers = [name for name, module in models["base"].named_modules() if name.endswith("_proj")]
    for number, name in enumerate(names):
        made, rank = folder / name, 4 + number
        if number % 4 == 3:
            mlx_lora.save_peft_adapter(
                made, models["base"], layers[number:], rank=rank, seed=number, size=0.2
            )
            models[name] = mlx_lora.merged_from_peft(base, made, 8 / rank)
            continue
        keys = (None, ["self_attn.q_proj", "mlp.up_proj"], ["model.embed_tokens", "lm_head"])[number % 4]
        mlx_lora.save_mlx_adapter(made, base, keys, rank=rank, seed=number, size=0.2)
        models[name] = mlx_lora.merged_by_mlx_lm(base, made)
    tokenizer = AutoTokenizer.from_pretrained(base)

    def answer_of(name: str, prompt: str) -> str:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        return str(tokenizer.decode(mlx_lora.greedy(models[name], ids, TOKENS), skip_special_tokens=True))

    return base, answer_of


def has_peft() -> bool:
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True


def made_and_merged(base: Path, directory: Path, number: int) -> Any:
    """Saves adapter `number`, each of another kind, and returns the model with its weights merged."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if not has_peft():
        save_adapter(directory, model, linears_of(model), seed=number, rank=4 + number, size=0.2)
        return merge(model, directory)
    from peft import LoraConfig, PeftModel, get_peft_model

    kinds: list[dict[str, Any]] = [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {"target_modules": r".*layers\.1\..*proj", "rank_pattern": {"down_proj": 3}},
        {"target_modules": ["gate_proj", "up_proj"], "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 20}},
        {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
        {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "down_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]},
    ]
    torch.manual_seed(number)
    config = LoraConfig(r=4 + number, lora_alpha=16, init_lora_weights=False, **kinds[number % len(kinds)])
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
            elif "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    adapted.save_pretrained(directory, save_embedding_layers=False)
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return PeftModel.from_pretrained(again, directory).merge_and_unload().eval()


def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def ask(client: httpx.Client, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


# ---- every architecture


def survey(folder: Path, models: list[str]) -> dict[str, Any]:
    found: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for model_type in models:
        directory = save(folder / model_type, model_type)
        own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        made = save_adapter(folder / f"{model_type}-adapter", own, linears_of(own), size=0.08)
        try:
            loaded = load(directory).load_adapter(read_adapter(model_type, made))
        except ModelError as error:
            refused[model_type] = error.message
            print(f"{model_type}: {error.message}", flush=True)
            continue
        found[loaded.batching] += 1
        print(f"{model_type}: {loaded.batching}, {loaded.modules} layers", flush=True)
    return {"architectures": len(models), "take_adapters": found.total(), **found, "refused": refused}


def survey_of_mlx(folder: Path, models: Sequence[str] | None) -> dict[str, Any]:
    """Loads an adapter of mlx-lm's format for each architecture that the MLX runtime serves."""
    import mlx.core as mx

    import mlx_lora
    from twins import mlx_models, mlx_served

    mx.disable_compile()
    names = list(mlx_models.ARCHITECTURES if models is None else models)
    found: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for name in names:
        try:
            directory = mlx_models.save(folder / name, name)
            made = mlx_lora.save_mlx_adapter(folder / f"{name}-adapter", directory, size=0.05)
            loaded = mlx_served.load(directory).load_adapter(read_adapter(name, made))
        except Exception as error:  # of any model's code
            refused[name] = error.message if isinstance(error, ModelError) else repr(error)
            print(f"{name}: {refused[name]}", flush=True)
            continue
        found[loaded.batching] += 1
        print(f"{name}: {loaded.batching}, {loaded.modules} layers", flush=True)
    return {"architectures": len(names), "take_adapters": found.total(), **found, "refused": refused}


# ---- embeddings


def embedded(folder: Path) -> dict[str, Any]:
    texts = [TEXT.lower()[:count].strip() for count in (3, 40, 17, 26, 1)]
    difference, compared = 0.0, 0
    for number, (kind, pooling) in enumerate((("bert", "mean"), ("bert", "cls"), ("qwen3", "lasttoken"))):
        directory = save_embedding_model(folder / f"embedding-{number}", kind, pooling)
        config = ModelConfig(str(directory), device="cpu", dtype="float32", threads=1)
        embedder = load_embedder(config, directory)
        ours = embedder.embed([embedder.tokens_of(text) for text in texts])
        difference = max(difference, float(abs(ours - theirs(directory, pooling, texts)).max()))
        compared += len(texts)
    return {"embedding_difference": difference, "embeddings": compared, "embedding_oracle": oracle()}


def oracle() -> str:
    try:
        import sentence_transformers  # noqa: F401
    except ImportError:
        return "transformers"
    return "sentence-transformers"


def theirs(directory: Path, pooling: str, texts: list[str]) -> Any:
    if oracle() == "transformers":
        from embedding_models import own_embedding

        return torch.stack([own_embedding(directory, text, pooling) for text in texts]).numpy()
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu").encode(texts)


if __name__ == "__main__":
    main()
