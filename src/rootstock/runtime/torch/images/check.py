"""Self-check of images at a load: the runtime's logits for a prompt with an image must be the model's own.

It also finds out whether the rows of an image see each other: logits that do not agree with causal rows must agree
with rows that see both directions. A model whose images fail the check is served as a model of text.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from rootstock.cache.families import RecurrentState, token_families
from rootstock.cache.image_tokens import PlacedImage, chunk_end
from rootstock.cache.types import NO_SLOT, SlotId, Tokens
from rootstock.runtime.base import Batch, Logits, ModelDescription, Runtime, Segment
from rootstock.runtime.torch.images.reader import ImagesUnsupported, Inputs, TorchImageReader
from rootstock.runtime.torch.images.step import StepImages
from rootstock.runtime.torch.inspect.survey import say
from rootstock.runtime.torch.self_check import own_attention, rounding
from rootstock.runtime.trial import BLOCK_SIZE, measure_for

_log = logging.getLogger(__name__)

_BEFORE, _AFTER, _DECODED = 5, 6, 3  # tokens around the image; the last ones are decoded one by one
_HEIGHT, _WIDTH = 64, 96  # of the image
_FLOAT32_TOLERANCE = 1e-3


def open_images(
    model: nn.Module,
    directory: Path,
    description: ModelDescription,
    make_runtime: Callable[[StepImages], Runtime],
    *,
    trust_remote_code: bool,
) -> tuple[StepImages | None, str]:
    """Returns the images of a model that sees them, and "seen"; None and the reason, which the log has too, if they
    cannot be served. ("": a model of text.)"""
    if type(model.config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None, ""
    try:
        if description.execution_mode == "one sequence per forward":
            raise ImagesUnsupported("it is run one sequence per forward")
        reader = TorchImageReader(model, directory, trust_remote_code=trust_remote_code)
        images = StepImages(model, reader)
        _check(model, description, images, make_runtime)
    except Exception as error:  # the model's own code may raise anything
        reason = str(error) if isinstance(error, ImagesUnsupported) else say(error)
        _log.warning("Images are not seen, and a line of text stands for each: %s", reason)
        return None, f"not seen: {reason}"
    return images, "seen"


def _check(
    model: nn.Module,
    description: ModelDescription,
    images: StepImages,
    make_runtime: Callable[[StepImages], Runtime],
) -> None:
    """Raises ImagesUnsupported if the runtime's logits are not the model's own in either direction."""
    reader = images.reader
    allowed = rounding(model, description)
    if description.dtype == "float32":
        allowed = max(allowed, _FLOAT32_TOLERANCE)
    layout, inputs, ids = reader.of_pixels(_picture())
    text = torch.arange(_BEFORE + _AFTER) + description.vocab_size // 2 - 20
    ids = torch.cat([text[:_BEFORE], ids, text[_BEFORE:]])
    expected = _own_logits(model, images, inputs, ids)
    rows = (ids == reader.row_token).nonzero()[:, 0].numpy()
    tokens = ids.numpy().astype(np.int32)
    tokens[rows] = layout.tokens()
    errors = []
    for both in (False, True):
        reader.sees_both_directions = both
        placed = PlacedImage(replace(layout, sees_both_directions=both), b"", int(rows[0]))
        ours = _logits_of(make_runtime(images), tokens, placed)
        errors.append(measure_for(description.dtype)(ours, expected))
        if errors[-1] <= allowed:
            reader.forget(None)
            return
    differences = " and ".join(f"{error:.2g}" for error in errors)
    raise ImagesUnsupported(
        f"logits differ from the model's own by {differences} (causal, both directions); {allowed:.2g} is allowed"
    )


def _picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Makes a picture [height, width, 3] that has no two equal parts."""
    y, x = np.mgrid[:_HEIGHT, :_WIDTH]
    return np.stack([2 * x, 3 * y, (x * y) % 251], axis=-1).astype(np.uint8)


def _own_logits(model: nn.Module, images: StepImages, inputs: Inputs, ids: Tensor) -> Logits:
    """Returns the logits [tokens, vocab] of the model's own code, in one pass."""
    device = next(model.parameters()).device
    taken = inspect.signature(type(model).forward).parameters
    kinds = images.reader.kinds(ids).to(device)
    given: dict[str, Any] = {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
    given |= {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
        if name in taken and not name.startswith("pixel_values")
    }
    encoded = images.encoded(inputs)
    with torch.inference_mode(), own_attention(model):
        own: Any = model
        output = own(
            input_ids=ids[None].to(device), mm_encoder_outputs={"image": encoded}, use_cache=False, **given
        )
        logits: Logits = output.logits[0].float().cpu().numpy()
    return logits


def _logits_of(runtime: Runtime, tokens: Tokens, image: PlacedImage) -> Logits:
    """Returns the logits [tokens, vocab] of a runtime, in chunks and decodes as an engine would ask for them."""
    families = runtime.description.families
    size = runtime.description.block_size or BLOCK_SIZE
    blocks = -(-len(tokens) // size)
    runtime.allocate([1 if isinstance(each, RecurrentState) else blocks for each in families], size)
    token_wise = token_families(families)
    tables = tuple(np.arange(blocks, dtype=np.int32) for _ in token_wise)
    state = SlotId(0) if len(token_wise) < len(families) else NO_SLOT
    inside = image.start + int(image.layout.offsets[len(image.layout.offsets) // 2])
    ends = [chunk_end([image], 0, inside), chunk_end([image], inside, image.end)]
    ends += [*range(len(tokens) - _DECODED, len(tokens) + 1)]
    past, logits = 0, []
    for end in sorted(set(ends)):
        segment = Segment(tokens[past:end], past, tables, end - past, state, images=(image,))
        logits.append(runtime.forward(Batch([segment])))
        past = end
    return np.concatenate(logits)
