"""Small models of text and images with random weights, written to disk with a tokenizer, a template and a processor.

The tokenizer is of bytes, so that any text has tokens. Sizes of images are a hundredth of the real ones.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from checkpoints import byte_level
from torchvision_here import HAS_TORCHVISION

# Of transformers' processors, these need torchvision.
_WITH_TORCHVISION = ("mistral3", "llama4")
FAMILIES = ("qwen3_vl", "gemma3", "qwen3_5", *(_WITH_TORCHVISION if HAS_TORCHVISION else ()))

_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
_OF_IMAGES: dict[str, list[str]] = {
    "qwen3_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "qwen3_5": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "llama4": [
        "<|image|>",
        "<|patch|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ],
}
_WRITTEN = {
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "mistral3": "[IMG]",
    "llama4": "<|image|>",
}
_TEMPLATE = (
    "{%% for m in messages %%}<|{{ m.role }}|>{%% if m.content is string %%}{{ m.content }}{%% else %%}"
    "{%% for part in m.content %%}{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}"
    "{%% endfor %%}"
    "{%% endif %%}<|end|>{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}


def picture(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """Makes a picture of noise and a gradient."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, 60, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    gradient = np.stack([x * 190 // width, y * 190 // height, (x + y + 31 * seed) % 190], -1)
    return Image.fromarray((noise + gradient).astype(np.uint8))


def file_of(image: Image.Image, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def save_images(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a model of a family, its tokenizer and its processor."""
    tokenizer = _tokenizer(family)
    config = _config(family, tokenizer)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_vector = parameter.dim() < 2 and not name.endswith(("A_log", "dt_bias"))
            if is_vector or "embed" in name or "class_embedding" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
            elif parameter.dim() >= 2:
                parameter.copy_(0.12 * torch.randn(parameter.shape, generator=random))
    model.to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _processor(family, tokenizer).save_pretrained(directory)
    return directory


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    special = [*_SPECIAL, *_OF_IMAGES[family]]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_level(models.BPE({piece: id for id, piece in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", **_named(family))
    wrapped.chat_template = _TEMPLATE % _WRITTEN[family]
    return wrapped


def _named(family: str) -> dict[str, Any]:
    if family != "gemma3":
        return {}
    boi, eoi, image = _OF_IMAGES[family]
    return {"extra_special_tokens": {"boi_token": boi, "eoi_token": eoi, "image_token": image}}


def _config(family: str, tokenizer: Any) -> Any:
    def id_of(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    vocab = len(tokenizer) + 7
    text = {**_TEXT, "vocab_size": vocab, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    of_images = [id_of(token) for token in _OF_IMAGES[family]]
    match family:
        case "qwen3_vl" | "qwen3_5":
            start, end, image, video = of_images
            vision = {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8,
                "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
            }  # fmt: skip
            text["rope_parameters"] = _MROPE
            if family == "qwen3_5":
                vision.pop("deepstack_visual_indexes")
                text |= {
                    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
                    "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
                }  # fmt: skip
            fields = {
                "image_token_id": image, "video_token_id": video, "vision_start_token_id": start,
                "vision_end_token_id": end,
            }  # fmt: skip
        case "gemma3":
            boi, eoi, image = of_images
            vision = {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 32, "patch_size": 4,
            }  # fmt: skip
            text |= {
                "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 16,
            }  # fmt: skip
            fields = {
                "mm_tokens_per_image": 16, "boi_token_index": boi, "eoi_token_index": eoi, "image_token_index": image,
            }  # fmt: skip
        case "mistral3":
            vision = {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 2, "head_dim": 16, "image_size": 128, "patch_size": 8,
            }  # fmt: skip
            text["model_type"] = "mistral"
            fields = {"image_token_index": of_images[0]}
        case "llama4":
            vision = {
                "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 32, "patch_size": 8, "vision_output_dim": 48, "projector_input_dim": 48,
                "projector_output_dim": 48,
            }  # fmt: skip
            text |= {
                "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 32,
                "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
                "moe_layers": [1],
            }  # fmt: skip
            fields = {
                "image_token_index": of_images[1], "boi_token_index": of_images[2], "eoi_token_index": of_images[3],
            }  # fmt: skip
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **fields)


def _processor(family: str, tokenizer: Any) -> Any:
    template = tokenizer.chat_template
    match family:
        case "qwen3_vl" | "qwen3_5":
            # As older checkpoints have it: no file of the processor itself.
            return Qwen2VLImageProcessorPil(
                patch_size=8, merge_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 96 * 96}
            )
        case "gemma3":
            images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
            return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=16)
        case "mistral3":
            from transformers import PixtralImageProcessor, PixtralProcessor

            images = PixtralImageProcessor(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8})
            return PixtralProcessor(
                images, tokenizer, patch_size=8, spatial_merge_size=2, chat_template=template
            )
        case "llama4":
            from transformers import Llama4ImageProcessor, Llama4Processor

            images = Llama4ImageProcessor(size={"height": 32, "width": 32}, max_patches=4)
            return Llama4Processor(
                images, tokenizer, patch_size=8, pixel_shuffle_ratio=0.5, chat_template=template
            )
    raise AssertionError(family)
