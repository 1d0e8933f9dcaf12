"""A Llama of safetensors as one GGUF file, the format of llama.cpp: the same weights, tokenizer and chat template.

    PYTHON llama_gguf.py MODEL_DIRECTORY OUT.gguf [bfloat16|float16|Q4_0|Q8_0|Q4_K_M]

The interpreter needs numpy and gguf, and xllamacpp for quantized types, which llama.cpp's own code rounds. The format
is that of llama.cpp's convert_hf_to_gguf.py and quantize: the names of tensors and keys; norms in float32; reordered
rows of Q and K, because llama.cpp rotates neighbours where transformers rotates halves; and the types of Q4_K_M.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NAMES_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(directory: Path, out: Path, dtype: str) -> None:
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    add_sizes(writer, config, dtype)
    add_tokenizer(writer, directory, config)
    layers = config["num_hidden_layers"]
    for name, bits in tensors_of(directory):
        add_tensor(writer, gguf_name(name), permuted(name, bits, config), dtype, layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], dtype: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    named = {"bfloat16": "BF16", "float16": "F16"}.get(dtype, dtype)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{named}"])


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """Adds the byte-level BPE, which splits text as GPT-2's does."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    described = json.loads((directory / "tokenizer_config.json").read_text())
    size = config["vocab_size"]
    tokens = [f"<unused{i}>" for i in range(size)]
    types = [int(gguf.TokenType.UNUSED)] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(gguf.TokenType.CONTROL)
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ends = config["eos_token_id"]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)  # the chat template writes it
    template = directory / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.exists() else described["chat_template"])


def tensors_of(directory: Path) -> list[tuple[str, np.ndarray]]:
    """Returns the name and the bits, [rows, columns] uint16 of bfloat16, of every weight.

    A file begins with the length of its header in 8 bytes.
    """
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, mode="r")
        header_bytes = int(raw[:8].view(np.uint64)[0])
        header = json.loads(raw[8 : 8 + header_bytes].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            found.append((name, raw[begin:end].view(np.uint16).reshape(entry["shape"])))
    return found


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES_IN_LAYERS[rest.removesuffix('.weight')]}.weight"


def permuted(name: str, bits: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Puts the i-th row of the first half of each head beside the i-th of the second."""
    if "q_proj" not in name and "k_proj" not in name:
        return bits
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    rows, columns = bits.shape
    halves = bits.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def add_tensor(writer: gguf.GGUFWriter, name: str, bits: np.ndarray, dtype: str, layers: int) -> None:
    if bits.ndim == 2 and dtype == "bfloat16":
        in_bytes = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, in_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
        return
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    if bits.ndim == 2 and dtype != "float16":
        named = kind_of_q4_k_m(name, layers, exact.shape[1]) if dtype == "Q4_K_M" else dtype
        kind = gguf.GGMLQuantizationType[named]
        writer.add_tensor(name, quantized(exact, kind), raw_dtype=kind)
        return
    writer.add_tensor(name, exact if bits.ndim == 1 else exact.astype(np.float16))


def kind_of_q4_k_m(name: str, layers: int, columns: int) -> str:
    """Returns the type of a matrix: llama.cpp gives more bits to the head and, in some layers, to two others, and
    takes other types where rows have no whole blocks of 256."""
    has_more = name == "output.weight"
    if "attn_v" in name or "ffn_down" in name:
        layer = int(name.split(".")[1])
        has_more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if columns % 256:
        return "Q8_0" if has_more else "Q5_0"
    return "Q6_K" if has_more else "Q4_K"


def quantized(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns the blocks [rows, bytes] that llama.cpp makes of a matrix of float32."""
    import xllamacpp

    [library] = Path(xllamacpp.__file__).parent.glob("*.so")
    quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    rows, columns = weight.shape
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.empty((rows, columns // numbers * size), np.uint8)
    source = np.ascontiguousarray(weight)
    arguments = (
        ctypes.c_int(kind),
        source.ctypes.data_as(ctypes.c_void_p),
        blocks.ctypes.data_as(ctypes.c_void_p),
        *(ctypes.c_int64(number) for number in (0, rows, columns)),
        ctypes.c_void_p(),
    )
    written = quantize(*arguments)
    assert written == blocks.nbytes, f"{written} bytes instead of {blocks.nbytes}"
    return blocks


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "bfloat16")
