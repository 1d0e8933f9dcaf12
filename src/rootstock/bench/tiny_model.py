"""A small model with a tokenizer and a chat template, made on the spot: nothing is downloaded.

It is a Llama of about 6 million parameters in Hugging Face's format. It is not trained. Its embeddings and its head
factor the bigram statistics of a made-up text (`corpus.py`), so that it writes in words. Its layers are random, so
that every token of the context changes the next one. The demo needs both: an answer that returns in the next prompt
must have the cached tokens again, and a wrong block must change the answer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock.bench.corpus import document
from rootstock.bench.scenario import AGENTS, SYSTEM_PROMPT, TOOLS
from rootstock.runtime.model_files import user_cache_folder

# Part of the directory's name. Raise it when a change below changes the model.
VERSION = 3
NAME = "rootstock-tiny"

BEGIN, END, TURN_END = "<|begin|>", "<|end|>", "<|turn_end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (BEGIN, END, TURN_END, *ROLES)

# The rendering of a conversation only grows at its end.
CHAT_TEMPLATE = """\
{{- '<|begin|>' }}
{%- if tools or messages[0]['role'] == 'system' %}
    {{- '<|system|>\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n# Tools\\n' }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\\n\\nWrite a call as\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|turn_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' and not loop.first %}
        {{- raise_exception('Only the first message may be of the system.') }}
    {%- elif message['role'] in ('user', 'tool') %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|turn_end|>\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|turn_end|>\\n' }}
    {%- elif message['role'] != 'system' %}
        {{- raise_exception('There is no role ' + message['role'] + '.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}"""


@dataclass(frozen=True, slots=True)
class TinyModelSpec:
    seed: int = 0
    vocab_size: int = 4096  # at most: a small text has fewer pairs to merge
    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    context_limit: int = 16_384
    corpus_lines: int = 6000

    @property
    def directory_name(self) -> str:
        sizes = f"{self.vocab_size}-{self.hidden_size}x{self.layers}-{self.heads}-{self.kv_heads}"
        more = f"{self.intermediate_size}-{self.context_limit}-{self.corpus_lines}"
        return f"{NAME}-v{VERSION}-{sizes}-{more}-s{self.seed}"


# With this seed the best two logits of each of the demo's 480 tokens differ by at least 4e-4 standard deviations.
# Another division of a prefill into chunks moves float32 logits by less than 1e-5.
DEMO_SPEC = TinyModelSpec()


def ensure_tiny_model(
    spec: TinyModelSpec = DEMO_SPEC,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Returns the model's directory below `folder` (the user's cache). Makes the model if it is missing or broken."""
    target = (folder or user_cache_folder()) / spec.directory_name
    if _is_whole(target):
        return target
    progress(f"making a small model, once, in {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_tiny_model(spec, made)
        made.chmod(0o755)  # mkdtemp and safetensors make files that only their owner can read
        for file in made.iterdir():
            file.chmod(0o644)
        _move_into_place(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def write_tiny_model(spec: TinyModelSpec, directory: Path) -> None:
    """Writes the files of a Hugging Face checkpoint. The same spec makes the same model."""
    text = _training_text(spec)
    tokenizer = _train_tokenizer(text, spec.vocab_size)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    tokens = tokenizer.get_vocab_size()
    vocab_size = (
        tokens // _VOCAB_MULTIPLE + 1
    ) * _VOCAB_MULTIPLE  # more logits than tokens, as most models have
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(spec))
    _write_json(directory / "config.json", _model_config(spec, vocab_size, ids))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": ids[BEGIN], "eos_token_id": [ids[TURN_END], ids[END]], "do_sample": False},
    )
    prose = [line for line in text if not line.endswith("\n")]  # without tables and code
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(prose)]
    _write_weights(directory / "model.safetensors", _weights(spec, tokens, vocab_size, encoded))


# ---- files


_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)


def _is_whole(directory: Path) -> bool:
    """Checks that every file exists and can be read: a full disk may have left half a model."""
    try:
        for name in _FILES:
            if name.endswith(".json"):
                json.loads((directory / name).read_text(encoding="utf-8"))
        return _safetensors_size(directory / "model.safetensors") == os.path.getsize(
            directory / "model.safetensors"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _safetensors_size(path: Path) -> int:
    """Returns the size that the file's header names: 8 bytes of its length, the header, the tensors."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > 1 << 20:
            raise ValueError("not a header of ours")
        header = json.loads(file.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + header_bytes + int(max(ends))


def _move_into_place(made: Path, target: Path) -> None:
    """Publishes the model by one rename. If another process was faster, its equal model stays."""
    if target.exists() and not _is_whole(target):
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not _is_whole(target):
            raise


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(path: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    from safetensors.numpy import save_file

    save_file(weights, str(path), metadata={"format": "pt"})


# ---- the tokenizer


def _training_text(spec: TinyModelSpec) -> list[str]:
    story = [
        SYSTEM_PROMPT,
        *(json.dumps(tool) for tool in TOOLS),
        *(step.text for agent in AGENTS for step in agent.steps),
    ]
    return document(spec.seed, spec.corpus_lines) + story * 4


def _train_tokenizer(text: list[str], vocab_size: int) -> Any:
    """Trains byte-level BPE (GPT-2, Radford et al. 2019), which can encode and restore every string."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def _tokenizer_config(spec: TinyModelSpec) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": TURN_END,
        "pad_token": END,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.context_limit,
        "chat_template": CHAT_TEMPLATE,
    }


# ---- the model

_VOCAB_MULTIPLE = 64


def _model_config(spec: TinyModelSpec, vocab_size: int, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids[BEGIN],
        "eos_token_id": [ids[TURN_END], ids[END]],
        "pad_token_id": ids[END],
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "head_dim": spec.hidden_size // spec.heads,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.context_limit,
        "mlp_bias": False,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


# Gains of the layers, relative to embeddings of root mean square 1: large enough to choose among the words that may
# follow, too small to choose others.
_ATTENTION_SHARE = 0.3
_MLP_SHARE = 0.3
_QUERY_SCALE = 8.0  # attention selects single positions; with 1 it would average over all


def _weights(
    spec: TinyModelSpec, tokens: int, vocab_size: int, encoded: list[list[int]]
) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(spec.seed)
    rows = ((0, vocab_size - tokens), (0, 0))  # of no token
    embeddings, head = (
        np.pad(each, rows) for each in _bigram_factors(encoded, tokens, spec.hidden_size, rng)
    )
    weights = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": np.ones(spec.hidden_size, np.float32),
        "lm_head.weight": head,
    }
    hidden, inner = spec.hidden_size, spec.intermediate_size
    kv_width = hidden // spec.heads * spec.kv_heads

    def random(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        return rng.normal(0, gain / np.sqrt(columns), (rows, columns)).astype(np.float32)

    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.self_attn.q_proj.weight": random(hidden, hidden, _QUERY_SCALE),
            f"{name}.self_attn.k_proj.weight": random(kv_width, hidden, 1.0),
            f"{name}.self_attn.v_proj.weight": random(kv_width, hidden, 1.0),
            f"{name}.self_attn.o_proj.weight": random(hidden, hidden, _ATTENTION_SHARE),
            f"{name}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.mlp.gate_proj.weight": random(inner, hidden, 1.0),
            f"{name}.mlp.up_proj.weight": random(inner, hidden, 1.0),
            f"{name}.mlp.down_proj.weight": random(hidden, inner, _MLP_SHARE),
        }
    return weights


def _bigram_factors(
    encoded: list[list[int]], vocab_size: int, hidden: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Factors log p(next | token), up to each row's scale, into embeddings and head [vocab, hidden] each.

    A truncated SVD by random projection (Halko, Martinsson and Tropp 2011).
    """
    counts = np.zeros((vocab_size, vocab_size))
    for ids in encoded:
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    prior = counts.sum(0) + 0.01  # positive for every token, so that each logarithm exists
    prior /= prior.sum()
    seen = counts.sum(1, keepdims=True)
    logs = np.log((counts + prior) / (seen + 1))
    logs -= logs.mean(1, keepdims=True)  # a constant for all next tokens changes nothing
    basis = rng.normal(size=(vocab_size, hidden + 32))
    basis = np.linalg.qr(logs @ basis)[0]
    basis = np.linalg.qr(logs.T @ basis)[0]
    left, values, right = np.linalg.svd(logs @ basis, full_matrices=False)
    # Fixes the signs of singular vectors, which depend on the LAPACK, so that every machine makes the same model.
    signs = np.sign(rng.normal(size=vocab_size) @ left[:, :hidden])
    root = signs * np.sqrt(values[:hidden])
    embeddings = left[:, :hidden] * root
    head = (basis @ right.T)[:, :hidden] * root
    # Rows of equal norm give the layers equal influence on all tokens. The last norm removes a row's scale.
    embeddings /= np.sqrt((embeddings**2).mean(1, keepdims=True)) + 1e-9
    # Only the template writes special tokens.
    specials = len(SPECIAL_TOKENS)
    head[:specials] = 0
    return np.ascontiguousarray(embeddings, np.float32), np.ascontiguousarray(head, np.float32)
