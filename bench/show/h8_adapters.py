"""H8, the second half of line 4: LoRA adapters on one base, and embeddings.

served     a server with eight adapters of one base: their requests and the base's, all at once over HTTP, have the
           greedy float32 answers of each alone, which are those of transformers with merged weights. PEFT makes and
           merges the adapters where it is installed, else this repository's own code. Steps tell whether they shared
           forwards
survey     all architectures of the twins: an adapter on every linear layer passes the check at load, which
           compares a batch of it and the base with merged weights. `mixed` shares forwards, `apart` has its own
embedded   tiny embedding models: the largest difference from sentence-transformers' own, where it is installed
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import Counter
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
WAIT_S = 120.0
TEXT = "The quick brown fox jumps over the lazy dog while it rains. "


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=("served", "survey", "embedded"), action="append", default=[])
    parser.add_argument(
        "--models", nargs="*", default=list(ARCHITECTURES), help="architectures of the survey"
    )
    options = parser.parse_args()
    chosen = options.only or ["served", "survey", "embedded"]
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "served" in chosen:
            figures |= served(Path(folder))
            asked = (ADAPTERS + 1) * PROMPTS
            bars |= {
                "equal_to_alone": exactly(asked),
                "equal_to_merged": exactly(asked),
                "different_answers_of_one_prompt": at_least(ADAPTERS),
                "tokens_per_step_together": at_least(4),
            }
        if "survey" in chosen:
            figures |= survey(Path(folder), options.models)
            bars |= {"take_adapters": exactly(len(options.models))}
        if "embedded" in chosen:
            figures |= embedded(Path(folder))
            bars |= {"embedding_difference": at_most(2e-5)}
    conclude("H8", figures, bars)


# ---- eight adapters over HTTP


def served(folder: Path) -> dict[str, Any]:
    base = save_served(folder / "base")
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    models = {"base": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()}
    for number, name in enumerate(names):
        models[name] = made_and_merged(base, folder / name, number)
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [TEXT * 3 + str(number) for number in range(PROMPTS)]
    cases = [(name, prompt) for prompt in prompts for name in ("base", *names)]
    merged = {(name, prompt): greedy(models[name], tokenizer, prompt) for name, prompt in cases}
    adapters = [f"--adapter={name}={folder / name}" for name in names]
    with rootstock_server(base, "--dtype", "float32", "--served-model-name", "base", *adapters) as process:
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
        "oracle": "PEFT" if has_peft() else "our own merge",
        "listed_models": len(listed),
        "equal_to_alone": sum(together.get(case) == alone[case] for case in cases),
        "equal_to_merged": sum(alone[case] == merged[case] for case in cases),
        "different_answers_of_one_prompt": min(len({alone[n, p] for n in ("base", *names)}) for p in prompts),
        "tokens_per_step_together": round((after["sampled_tokens"] - before["sampled_tokens"]) / steps, 2),
    }


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
