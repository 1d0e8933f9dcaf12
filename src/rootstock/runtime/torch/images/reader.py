"""Reader of the images that a transformers model sees: the checkpoint's own processor, and the layout of an image."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from rootstock.cache.fair_memory import FairMemory
from rootstock.cache.image_tokens import ImageLayout, PlacedImage, SmallImages
from rootstock.errors import ImageUnusable
from rootstock.runtime.image_files import ImageDecoder, Pixels, UndecodableImage
from rootstock.runtime.torch.inspect.survey import say
from rootstock.units import MIB

Inputs = dict[str, Any]  # of the vision tower, by the names of its arguments: pixels, grids, sizes

MOST_LAYOUT_BYTES, MOST_INPUT_BYTES, MOST_FEATURE_BYTES = 64 * MIB, 256 * MIB, 256 * MIB
SLOW_S = 0.3  # an image that takes longer is not decoded in a forward
_OF_TEXT = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
}
_WORDS = ("Kestrel", "Wren")  # around an image, to see what the template writes for it


class ImagesUnsupported(Exception):
    """Error: a model or its processor reads images in a way that is not known here."""


class TorchImageReader:
    """Reader of images for a model. Any thread may call it."""

    def __init__(self, model: nn.Module, directory: Path, *, trust_remote_code: bool) -> None:
        """Loads the processor. Raises ImagesUnsupported."""
        self.sees_both_directions = False  # set by the self-check, before any layout is made
        self._model = model
        config: Any = model.config
        token = getattr(config, "image_token_id", None)
        token = getattr(config, "image_token_index", None) if token is None else token
        if token is None:
            raise ImagesUnsupported("its configuration names no token of images")
        self.row_token = int(token)
        self._processor = processor_of(config, directory, trust_remote_code=trust_remote_code)
        self._written = self._written_by_template()
        self._settings = _settings_of(self._processor)
        self._decoder = ImageDecoder()
        self._decoder_of_forwards = ImageDecoder()  # no file of another request delays a forward
        self._small = SmallImages()
        self._lock = threading.Lock()  # guards the small images
        self._layouts = FairMemory[ImageLayout](MOST_LAYOUT_BYTES)  # by the digest of the file
        # By the key of the layout: inputs until a forward takes them, and the features that it makes of them.
        self._inputs = FairMemory[Inputs](MOST_INPUT_BYTES)
        self.features = FairMemory[Any](MOST_FEATURE_BYTES)

    def layout(self, data: bytes, field: str, owner: str, salt: str) -> ImageLayout:
        digest = hashlib.sha256(self._settings + data).digest()
        known = self._layouts.get(owner, (salt, digest))
        if known is not None and not (known.is_slow and self._lacks(known)):
            return known
        began = time.monotonic()
        try:
            pixels = self._decoder.decode(data)
            inputs, ids, text = self._processed(pixels)
        except UndecodableImage as error:
            remedy = "Send a PNG, JPEG, WebP or GIF file of a usual size."
            raise ImageUnusable(field, f"it {error}", remedy) from error
        except Exception as error:  # from the processor, which may refuse a size or a shape
            reason = f"the model's processor refuses it ({say(error)})"
            raise ImageUnusable(field, reason, "Resize it.") from error
        made = self._made(digest, inputs, ids, text)
        is_slow = time.monotonic() - began > SLOW_S
        layout = replace(made, pixels=pixels.size // 3, owner=owner, salt=salt, is_slow=is_slow)
        self._layouts.put(owner, (salt, digest), layout, layout.nbytes)
        self._inputs.put(owner, layout.key, inputs, _nbytes(inputs))
        return layout

    def _lacks(self, layout: ImageLayout) -> bool:
        """Returns whether a forward would have to decode the image."""
        return all(kept.get(layout.owner, layout.key) is None for kept in (self.features, self._inputs))

    def forget(self, salt: str | None) -> None:
        for kept in (self._layouts, self._inputs, self.features):
            kept.forget(salt)

    def take_inputs(self, image: PlacedImage) -> Inputs:
        """Returns the inputs of the vision tower for an image, and forgets them. Decodes the file again if its layout
        was known: a slow one is decoded again before. Raises UndecodableImage."""
        inputs = self._inputs.take(image.layout.owner, image.layout.key)
        if inputs is None:
            inputs = self._processed(self._decoder_of_forwards.decode(image.data))[0]
        return inputs

    def of_pixels(self, pixels: Pixels) -> tuple[ImageLayout, Inputs, Tensor]:
        """Returns the layout of an image without a file, its inputs, which a forward can take, and the ids of the
        text that stands for it: for the self-check."""
        inputs, ids, text = self._processed(pixels)
        layout = self._made(hashlib.sha256(pixels.tobytes()).digest(), inputs, ids, text)
        self._inputs.put(layout.owner, layout.key, inputs, _nbytes(inputs))
        return layout, inputs, ids

    def kinds(self, ids: Tensor) -> Tensor:
        """Returns the kind of each token, as models take it: [1, tokens], 0 for a text's."""
        return torch.tensor(self._processor.create_mm_token_type_ids([ids.tolist()]))

    def _made(self, digest: bytes, inputs: Inputs, ids: Tensor, text: str) -> ImageLayout:
        rows = (ids == self.row_token).nonzero()[:, 0]
        first, last = int(rows[0]), int(rows[-1])
        positions, advance = self._positions(ids[first : last + 1], inputs)
        with self._lock:
            digest = self._small.unique(digest, len(rows))
        offsets = (rows - first).numpy().astype(np.int32)
        return ImageLayout(
            digest, text, self.row_token, offsets, positions, advance, self.sees_both_directions
        )

    def _processed(self, pixels: Pixels) -> tuple[Inputs, Tensor, str]:
        """Returns the vision tower's inputs for an image, the ids of the text that stands for it, and the text."""
        given = self._processor(
            images=[pixels],
            text=[self._written],
            return_tensors="pt",
            return_text_replacement_offsets=True,
        )
        ids = given["input_ids"][0]
        if not bool((ids == self.row_token).any()):
            raise ImagesUnsupported("its processor writes no token of images")
        (replaced,) = given["text_replacement_offsets"][0]
        text = self._written.replace(replaced["text"], replaced["replacement"])
        inputs = {name: value for name, value in given.items() if name not in _OF_TEXT}
        return inputs, ids, text

    def _positions(self, ids: Tensor, inputs: Inputs) -> tuple[NDArray[np.int32] | None, int]:
        """Returns the positions [axes, span] of an image's tokens for rotary embeddings, from the first row's on, and
        the position after them; (None, 0): they count like a text's."""
        model: Any = self._model
        rope_index = getattr(getattr(model, "model", model), "get_rope_index", None)
        if rope_index is None:
            return None, 0
        other = 0 if self.row_token else 1
        around = torch.cat([torch.tensor([other]), ids, torch.tensor([other])])[None]
        kinds = (around == self.row_token).int()
        grids = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        found = rope_index(around, mm_token_type_ids=kinds, **grids)[0][:, 0].numpy()
        before = found[:, :1] + 1
        assert (found[:, 0] == 0).all(), "a text's first position is 0 on each axis"
        return (found[:, 1:-1] - before).astype(np.int32), int(found[0, -1] - before[0, 0])

    def _written_by_template(self) -> str:
        """Returns what the chat template writes for an image, with the processor's token for it."""
        processor = self._processor
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str):
            raise ImagesUnsupported("its processor names no token of images")
        parts = [{"type": "text", "text": _WORDS[0]}, {"type": "image"}, {"type": "text", "text": _WORDS[1]}]
        try:
            rendered = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        except Exception:  # there is no template, or it takes only text
            return token
        _, _, after = rendered.partition(_WORDS[0])
        written, found, _ = after.partition(_WORDS[1])
        return written if found and written.count(token) == 1 else token


def processor_class(config: Any) -> Any:
    """Returns the class of a configuration's processor, which may lack the parts for video and audio: they need
    further packages. Raises ImportError if its parts for images need one that is missing."""
    kind: Any = PROCESSOR_MAPPING[type(config)]

    class ImageProcessor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    ImageProcessor.__name__ = kind.__name__  # it is written to the files of a processor
    return ImageProcessor


def processor_of(config: Any, directory: Path, *, trust_remote_code: bool) -> Any:
    """Loads a processor without its parts for video and audio. Raises ImagesUnsupported."""
    options = {"trust_remote_code": trust_remote_code}
    try:
        if type(config) not in PROCESSOR_MAPPING:
            return AutoProcessor.from_pretrained(directory, **options)
        kind = processor_class(config)
        declared, others = kind.get_processor_dict(directory)
        parts = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}
        made = [
            parts[name].from_pretrained(directory, **options) if name in parts else None
            for name in kind.get_attributes()
        ]
        return kind.from_args_and_dict(made, declared, **others)
    except ImportError as error:  # transformers says which package is missing in many lines
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise ImagesUnsupported(f"its processor needs another package ({reason})") from error
    except Exception as error:  # a file is missing, or the processor's own code fails
        raise ImagesUnsupported(f"its processor cannot be loaded ({say(error)})") from error


def _settings_of(processor: Any) -> bytes:
    """Returns a digest of what decides a processor's work: its settings, its class, and transformers' version."""
    images = processor.image_processor
    settings = [type(images).__name__, images.to_dict(), transformers.__version__]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).digest()


def _nbytes(inputs: Inputs) -> int:
    return sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))
