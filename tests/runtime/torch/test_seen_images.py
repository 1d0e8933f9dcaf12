"""Images that a model sees: small models of each family against transformers' own, through the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_checkpoints import FAMILIES, file_of, picture, save_images
from image_schedules import ANSWER_TOKENS, Player, Turns, messages_of
from rootstock.cache.families import RecurrentState, token_families
from rootstock.cache.image_tokens import FIRST_IMAGE_TOKEN, ImageLayout, PlacedImage
from rootstock.cache.types import NO_SLOT, SlotId
from rootstock.config import ModelConfig
from rootstock.errors import ImageFailed, ImageUnusable, InvalidParameter
from rootstock.llm.params import SamplingParams
from rootstock.runtime.base import Batch, Segment
from rootstock.runtime.torch.images.both_directions import runs_of
from rootstock.runtime.torch.images.reader import TorchImageReader
from rootstock.runtime.torch.images.step import rotary_positions
from rootstock.runtime.torch.runner import TorchRuntime, load_model

GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def player(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Player:
    return Player(save_images(tmp_path_factory.mktemp("images") / request.param, request.param))


def test_conversations_with_images_are_answered_as_transformers_does(player: Player, tmp_path: Path) -> None:
    for seed in range(2):
        player.play(seed, tmp_path / str(seed), steps=4)
    assert player.tally.wrong == []
    assert player.tally.images > 10


def test_the_second_turn_finds_the_first_one_cached(player: Player) -> None:
    first: Turns = (("user", (0, "What is this?")),)
    with player.opened(budget_bytes="64MiB") as llm:
        (output,) = llm.chat([messages_of(first)], GREEDY)
        second = (*first, ("assistant", (output.text,)), ("user", (1, "And this?")))
        (later,) = llm.chat([messages_of(second)], GREEDY)
        (other,) = llm.chat([messages_of((("user", (1, "What is this?")),))], GREEDY)
    prompt = np.array(output.prompt_token_ids)
    assert later.outputs[0].usage.cached_tokens >= len(prompt) - 1
    # Another picture of another size shares only what stands before it.
    assert other.outputs[0].usage.cached_tokens <= int(np.argmax(prompt >= FIRST_IMAGE_TOKEN))


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_runtime_in_bfloat16_reads_images(family: str, tmp_path: Path) -> None:
    directory = save_images(tmp_path / "model", family, torch.bfloat16)
    runtime = load_model(ModelConfig(model=str(directory), dtype="bfloat16"))
    assert runtime.images is not None
    assert runtime.description.images == "seen"


def test_pictures_of_the_same_size_are_told_apart(tmp_path: Path) -> None:
    directory = save_images(tmp_path / "model", FAMILIES[0])
    runtime = load_model(ModelConfig(model=str(directory), dtype="float32"))
    assert runtime.images is not None
    layouts = [runtime.images.layout(file_of(picture(seed)), "here", "", "") for seed in range(3)]
    assert runtime.images.layout(file_of(picture(0)), "here", "", "") is layouts[0]
    # Layouts are kept for one salt: no time tells that another tenant has sent it.
    assert runtime.images.layout(file_of(picture(0)), "here", "tenant", "salt") is not layouts[0]
    runtime.images.forget("")
    assert runtime.images.layout(file_of(picture(0)), "here", "", "") is not layouts[0]
    assert len({layout.tokens().tobytes() for layout in layouts}) == 3
    with pytest.raises(ImageUnusable, match="'messages' cannot be read: it is no PNG"):
        runtime.images.layout(b"nothing", "messages", "", "")


def test_a_vision_tower_that_fails_costs_its_own_request(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    with player.opened(budget_bytes="64MiB") as llm:
        (expected,) = llm.chat([messages_of((("user", ("Go on.",)),))], GREEDY)

    def fail(self: object, inputs: object) -> object:
        raise RuntimeError("a shape that it does not know")

    with player.opened(budget_bytes="64MiB") as llm:
        monkeypatch.setattr("rootstock.runtime.torch.images.step.StepImages.encoded", fail)
        with pytest.raises(ImageFailed, match="cannot read an image of this request: RuntimeError"):
            llm.chat([messages_of((("user", (0, "What is this?")),))], GREEDY)
        (output,) = llm.chat([messages_of((("user", ("Go on.",)),))], GREEDY)
    assert output.token_ids == expected.token_ids


def test_the_token_of_images_is_text_where_no_image_is(player: Player) -> None:
    """A model may sample it, or a prompt may have its id: beside an image, it must not get features."""
    runtime = load_model(ModelConfig(model=str(player.directory), dtype="float32"))
    assert isinstance(runtime.images, TorchImageReader)
    found = runtime.images.layout(file_of(picture(0)), "here", "", "")
    families = runtime.description.families
    runtime.allocate([64] * len(families), 16)
    stateful = isinstance(families[-1], RecurrentState)
    row = runtime.images.row_token

    def segment_of(number: int, tokens: Any, *images: PlacedImage) -> Segment:
        tables = tuple(np.arange(8, dtype=np.int32) + 8 * number for _ in token_families(families))
        state = SlotId(number) if stateful else NO_SLOT
        return Segment(np.array(tokens, np.int32), 0, tables, len(tokens), state, images=images)

    text = [20, row, 21, row, row]
    rows = np.full(found.span, 22)
    rows[found.offsets] = found.tokens()
    with_image = [23, 24, *rows, 25, row]
    image = PlacedImage(found, file_of(picture(0)), 2)
    alone = [
        runtime.forward(Batch([segment_of(0, text)])),
        runtime.forward(Batch([segment_of(1, with_image, image)])),
    ]
    together = runtime.forward(Batch([segment_of(2, text), segment_of(3, with_image, image)]))
    assert np.allclose(together, np.concatenate(alone), atol=1e-4)
    assert np.allclose(alone[0], runtime.forward(Batch([segment_of(4, text)])))


def test_too_many_images_are_refused_before_one_is_decoded(player: Player) -> None:
    elsewhere = {"type": "image_url", "image_url": {"url": "https://192.0.2.1/a.png"}}
    with player.opened(budget_bytes="64MiB") as llm:
        with pytest.raises(InvalidParameter, match="without images after 100 of them"):
            llm.chat([messages_of((("user", (0,) * 101),))], GREEDY)
        with pytest.raises(ImageUnusable, match="fetches no addresses"):
            llm.chat([[{"role": "user", "content": [elsewhere]}]], GREEDY)


def test_a_model_without_a_processor_is_served_as_a_model_of_text(tmp_path: Path) -> None:
    directory = save_images(tmp_path / "model", FAMILIES[0])
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink(missing_ok=True)
    runtime = load_model(ModelConfig(model=str(directory), dtype="float32"))
    assert isinstance(runtime, TorchRuntime)
    assert runtime.images is None
    assert runtime.description.images.startswith("not seen: its processor")


# ---- positions and runs


def layout(offsets: list[int], *, both: bool = False, height: int = 0) -> ImageLayout:
    """A layout of rows; with a height, its positions are those of a grid as Qwen's models count them."""
    rows = np.array(offsets, np.int32)
    positions, advance = None, 0
    if height:
        grid = np.arange(len(rows))
        width = len(rows) // height
        positions = np.stack([0 * grid, grid // width, grid % width]).astype(np.int32)
        advance = max(height, width)
    return ImageLayout(b"\0" * 32, "", 5, rows, positions, advance, both)


def segment(past: int, new: int, *images: PlacedImage) -> Segment:
    return Segment(np.zeros(new, np.int32), past, (), 0, images=images)


def test_positions_of_chunks_are_those_of_the_whole_prompt() -> None:
    images = (
        PlacedImage(layout(list(range(6)), height=2), b"", 3),
        PlacedImage(layout(list(range(4)), height=2), b"", 12),
    )
    whole = rotary_positions(segment(0, 20, *images), 3)
    assert whole[:, :3].tolist() == [[0, 1, 2]] * 3
    assert whole[:, 3:9].tolist() == [[3] * 6, [3, 3, 3, 4, 4, 4], [3, 4, 5, 3, 4, 5]]
    assert whole[:, 9:12].tolist() == [[6, 7, 8]] * 3
    assert whole[:, 12:16].tolist() == [[9] * 4, [9, 9, 10, 10], [9, 10, 9, 10]]
    assert whole[:, 16:].tolist() == [[11, 12, 13, 14]] * 3
    for past in range(20):
        for end in range(past + 1, 21):
            part = rotary_positions(segment(past, end - past, *images), 3)
            assert part.tolist() == whole[:, past:end].tolist(), (past, end)


def test_runs_of_a_step_begin_where_its_rows_do() -> None:
    image = PlacedImage(layout([0, 1, 2, 5, 6], both=True), b"", 4)
    (first, second) = runs_of([segment(0, 2), segment(0, 12, image)])
    assert (first.row, first.first, first.start, first.end, first.sequence) == (6, 4, 4, 7, 1)
    assert (second.row, second.first, second.start, second.end) == (11, 9, 9, 11)
    (resumed,) = runs_of([segment(10, 3, image)])
    assert (resumed.row, resumed.first, resumed.start, resumed.end) == (0, 10, 9, 11)
    assert runs_of([segment(11, 3, image)]) == []
