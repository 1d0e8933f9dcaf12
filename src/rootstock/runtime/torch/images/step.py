"""Images in a forward: features of the vision tower, at the rows of a step that they stand at.

transformers' models take features from outside (`mm_encoder_outputs`) and put them where the tokens of images stand,
as they do with features of their own. An image is computed alone and once, for all requests and chunks that have it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rootstock.cache.image_tokens import FIRST_IMAGE_TOKEN, PlacedImage
from rootstock.cache.types import Tokens
from rootstock.errors import ImageFailed
from rootstock.runtime.base import Segment
from rootstock.runtime.torch.images.reader import ImagesUnsupported, Inputs, TorchImageReader

_Positions = NDArray[np.int64]  # [tokens], or [axes, tokens]


class StepImages:
    """Features of images, and what a step with images gives to the model. Owned by the runtime's thread."""

    def __init__(self, model: nn.Module, reader: TorchImageReader) -> None:
        """Raises ImagesUnsupported for a model that takes no features from outside."""
        if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
            raise ImagesUnsupported("its code takes no features of images from outside")
        self.reader = reader
        self._model: Any = model
        self._of_step: dict[tuple[str, bytes], Any] = {}

    def compute(self, segments: Sequence[Segment]) -> None:
        """Computes the features of the images whose rows a step computes. Raises ImageFailed."""
        self._of_step = {}
        for number, segment in enumerate(segments):
            for image, _ in _rows_in(segment):
                try:
                    self._of_step[image.layout.key] = self._computed(image)
                except Exception as error:  # the code of the model or its processor may raise anything
                    if isinstance(error, torch.OutOfMemoryError):
                        torch.cuda.empty_cache()
                    raise ImageFailed(number, error) from error

    @contextlib.contextmanager
    def arguments(
        self, segments: Sequence[Segment], tokens: Tokens, positions: _Positions
    ) -> Iterator[tuple[Tokens, _Positions, dict[str, Any]]]:
        """Yields the tokens [tokens] of a step as the model has them, their positions, and further arguments of the
        model's forward, which runs within. The features are computed."""
        parts = [
            _select(self._of_step[image.layout.key], rows)
            for segment in segments
            for image, rows in _rows_in(segment)
        ]
        given = {"mm_encoder_outputs": {"image": _joined(parts)}} if parts else {}
        written = np.flatnonzero((tokens == self.reader.row_token) & bool(parts))
        tokens = np.where(tokens >= FIRST_IMAGE_TOKEN, np.int32(self.reader.row_token), tokens)
        layouts = [image.layout for segment in segments for image in segment.images]
        axes = next((len(each.positions) for each in layouts if each.positions is not None), None)
        if axes is not None:
            positions = np.concatenate([rotary_positions(segment, axes) for segment in segments], axis=1)
        if not len(written):
            yield tokens, positions, given
            return
        tokens[written] = 0
        with self._embedding_row_token(written):
            yield tokens, positions, given

    @contextlib.contextmanager
    def _embedding_row_token(self, places: NDArray[np.intp]) -> Iterator[None]:
        """Embeds the model's row token at these places of the forward within, where it is text: a model may have
        sampled it, or a client's prompt may have its id. The model would put features there."""

        def embed(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
            handle.remove()
            token = torch.tensor([[self.reader.row_token]], device=embedded.device)
            embedded[0, places] = module(token)[0]
            return embedded

        handle = self._model.get_input_embeddings().register_forward_hook(embed)
        try:
            yield
        finally:
            handle.remove()

    def _computed(self, image: PlacedImage) -> Any:
        """Returns the features of all rows of an image."""
        layout, kept = image.layout, self.reader.features
        found = kept.get(layout.owner, layout.key)
        if found is None:
            output, rows = self.encoded(self.reader.take_inputs(image)), len(layout.offsets)
            fields = {name: _rows_of(value, rows) for name, value in output.items()}
            found = type(output)(**{name: value for name, value in fields.items() if value is not None})
            kept.put(layout.owner, layout.key, found, _nbytes(found))
        return found

    def encoded(self, inputs: Inputs) -> Any:
        """Runs the vision tower for an image. Returns its output as transformers' models take it."""
        device, dtype = self._model.device, self._model.dtype
        taken = inspect.signature(self._model.get_image_features).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        moved = {}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None)
            if takes_all or name in taken:
                moved[name] = value
        self._use_own_attention()
        with torch.inference_mode():
            return self._model.get_image_features(**moved, return_dict=True)

    def _use_own_attention(self) -> None:
        """Has the vision tower use torch's attention: the pools' is for the decoder's layers."""
        config = self._model.config
        text = config.get_text_config(decoder=True)
        others = [name for name in config.sub_configs if getattr(config, name, None) not in (None, text)]
        if any(getattr(config, name)._attn_implementation != "sdpa" for name in others):
            self._model.set_attn_implementation(dict.fromkeys(others, "sdpa"))


def _rows_in(segment: Segment) -> Iterator[tuple[PlacedImage, slice]]:
    """Yields the images of which a segment computes rows, and these rows of each."""
    past, end = segment.past, segment.past + len(segment.tokens)
    for image in segment.images:
        first, last = np.searchsorted(image.start + image.layout.offsets, [past, end])
        if first < last:
            yield image, slice(int(first), int(last))


def rotary_positions(segment: Segment, axes: int) -> _Positions:
    """Returns the positions [axes, new] of a segment's tokens for rotary embeddings, if an image takes other ones
    than a text of as many tokens."""
    past, end = segment.past, segment.past + len(segment.tokens)
    found = np.broadcast_to(np.arange(past, end), (axes, end - past)).copy()
    shift = 0  # of a text's position from its index
    for image in segment.images:
        layout = image.layout
        if layout.positions is not None:
            first, last = max(past, image.start), min(end, image.end)
            if first < last:
                inside = layout.positions[:, first - image.start : last - image.start]
                found[:, first - past : last - past] = image.start + shift + inside
            shift += layout.advance - layout.span
            if image.end < end:
                begin = max(past, image.end)
                found[:, begin - past :] = np.arange(begin, end) + shift
    return found


def _rows_of(value: Any, rows: int) -> Any:
    """Returns a field of the vision tower's output with its tensors as [rows, dim]: tensors stay tensors, and the
    tensors of single images one in a tuple. None: it does not belong to the rows."""
    if isinstance(value, Tensor):
        whole = value.dim() >= 2 and value.numel() == rows * value.shape[-1]
        return value.reshape(rows, value.shape[-1]) if whole else None
    if not isinstance(value, (tuple, list)) or not value:
        return None
    if all(isinstance(each, Tensor) and each.dim() >= 2 for each in value):
        flat = torch.cat([each.reshape(-1, each.shape[-1]) for each in value]) if _alike(value) else None
        if flat is not None and len(flat) == rows:
            return (flat,)
    inner = [_rows_of(each, rows) for each in value]
    return inner if all(each is not None for each in inner) else None


def _alike(values: Sequence[Tensor]) -> bool:
    return len({value.shape[-1] for value in values}) == 1


def _select(value: Any, rows: slice) -> Any:
    """Returns the given rows of features."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, (tuple, list)):
        return type(value)(_select(each, rows) for each in value)
    return type(value)(**{name: _select(each, rows) for name, each in value.items()})


def _joined(parts: Sequence[Any]) -> Any:
    """Joins the rows of several features."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(each) for each in zip(*parts, strict=True))
    return type(first)(**{name: _joined([part[name] for part in parts]) for name in first})


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value.values() if hasattr(value, "values") else value))
