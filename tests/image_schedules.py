"""Schedules of conversations with images: shared, repeated, diverging behind an image, evicted, restarted.

Each answer is compared with transformers' own `generate` on the same messages, and with a runtime without a cache.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from image_checkpoints import file_of, picture
from rootstock.cache.image_tokens import FIRST_IMAGE_TOKEN
from rootstock.llm.llm import LLM
from rootstock.llm.outputs import RequestOutput
from rootstock.llm.params import SamplingParams
from rootstock.runtime.torch.images.reader import processor_of

ANSWER_TOKENS = 5
_WORDS = ("What is this?", "And here?", "Compare them.", "Describe it again, slowly.", "Why?", "Go on.")
# Of two to a few dozen tokens. (One token makes transformers' own code for Mistral 3 fail.)
_SIZES = ((96, 64), (64, 96), (40, 40), (32, 20), (200, 50), (33, 77))
PICTURES = tuple(picture(seed, *size) for seed, size in enumerate(_SIZES))
FILES = tuple(file_of(each) for each in PICTURES)

Part = str | int  # a text, or the number of a picture
Turn = tuple[str, tuple[Part, ...]]  # a role and its content
Turns = tuple[Turn, ...]


def messages_of(turns: Turns) -> list[dict[str, Any]]:
    """Returns messages as OpenAI's clients send them."""
    return [{"role": role, "content": [_sent(part) for part in parts]} for role, parts in turns]


def _sent(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:image/png;base64,{base64.b64encode(FILES[part]).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class TransformersSide:
    """A saved model as transformers runs it."""

    def __init__(self, directory: Path) -> None:
        config = AutoConfig.from_pretrained(directory)
        self.processor = processor_of(config, directory, trust_remote_code=False)
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        config = self.model.config
        token = getattr(config, "image_token_id", None)
        self.row_token = int(config.image_token_index if token is None else token)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def given(self, turns: Turns) -> Any:
        """Returns what the processor makes of a conversation."""
        conversation = [{"role": role, "content": [_shown(part) for part in parts]} for role, parts in turns]
        text = self.processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        images = [PICTURES[part] for _, parts in turns for part in parts if isinstance(part, int)]
        given = self.processor(
            text=[text], images=images or None, return_tensors="pt", add_special_tokens=False
        )
        if "pixel_values" in given:
            given["pixel_values"] = given["pixel_values"].to(torch.float32)
        return given

    def answer(self, turns: Turns, prompt: Sequence[int]) -> list[int]:
        """Returns the tokens that `generate` adds to a prompt of the runtime, with the images of its conversation.

        An earlier answer may stand in it with other tokens than its text has.
        """
        found = self._known.get(tuple(prompt))
        if found is None:
            found = self._known[tuple(prompt)] = self._answer(turns, prompt)
        return found

    def _answer(self, turns: Turns, prompt: Sequence[int]) -> list[int]:
        given = self.given(turns)
        ids = torch.tensor([[self.row_token if each >= FIRST_IMAGE_TOKEN else each for each in prompt]])
        kinds = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        given |= {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in given}
        with torch.inference_mode():
            out = self.model.generate(
                **given, max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0]
        return out[ids.shape[1] :].tolist()


def _shown(part: Part) -> dict[str, Any]:
    return (
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": PICTURES[part]}
    )


@dataclass
class Tally:
    """Counts over schedules."""

    schedules: int = 0
    requests: int = 0
    images: int = 0
    restarts: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    sampled_rows: int = 0  # prompts that cannot be compared
    wrong: list[str] = field(default_factory=list)


class Player:
    """Plays schedules on a saved model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tally = Tally()
        self.asked: list[Turns] = []  # different ones, in order

    @cached_property
    def transformers(self) -> TransformersSide:
        return TransformersSide(self.directory)

    def opened(self, **options: Any) -> LLM:
        return LLM(self.directory, dtype="float32", memory_check=False, threads=1, **options)

    def play(self, seed: int, disk: Path, steps: int = 6) -> None:
        """Plays one schedule: its options, conversations and restarts follow from the seed."""
        random = np.random.default_rng(seed)
        options: dict[str, Any] = {
            "block_size": int(random.choice([4, 16, 32])),
            "chunk_tokens": int(random.choice([16, 48, 512])),
            "budget_bytes": str(random.choice(["1MiB", "64MiB"])),
            "disk_dir": disk,
            "disk_budget_bytes": "1GiB",
            "draft_tokens": int(random.choice([0, 4])),
        }
        told: list[Turns] = []
        llm = self.opened(**options)
        try:
            for _ in range(steps):
                if told and random.random() < 0.2:
                    llm.close()
                    llm = self.opened(**options)
                    self.tally.restarts += 1
                asked = [self._next(random, told) for _ in range(int(random.integers(1, 4)))]
                outputs = llm.chat(
                    [messages_of(turns) for turns in asked],
                    SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
                )
                self.asked += [turns for turns in asked if turns not in self.asked]
                for turns, output in zip(asked, outputs, strict=True):
                    self.judge(turns, output, f"seed {seed}")
                    told.append((*turns, ("assistant", (output.text,))))
        finally:
            llm.close()
        self.tally.schedules += 1

    def judge(self, turns: Turns, output: RequestOutput, where: str) -> None:
        """Compares an answer with transformers' own."""
        tally = self.tally
        tally.requests += 1
        tally.images += sum(isinstance(part, int) for _, parts in turns for part in parts)
        tally.cached_tokens += output.outputs[0].usage.cached_tokens
        tally.prompt_tokens += len(output.prompt_token_ids)
        theirs = self.transformers
        ours = [theirs.row_token if each >= FIRST_IMAGE_TOKEN else each for each in output.prompt_token_ids]
        # The text of an answer need not give its tokens back: the runtime has remembered them.
        if (
            not any(role == "assistant" for role, _ in turns)
            and ours != theirs.given(turns)["input_ids"][0].tolist()
        ):
            tally.wrong.append(f"{where}: another prompt for {turns}")
        if theirs.row_token in output.prompt_token_ids:
            tally.sampled_rows += 1  # transformers takes a sampled token of images for an image
            return
        answer = theirs.answer(turns, output.prompt_token_ids)
        if list(output.token_ids) != answer:
            tally.wrong.append(f"{where}: {list(output.token_ids)} instead of {answer} for {turns}")

    def _next(self, random: np.random.Generator, told: Sequence[Turns]) -> Turns:
        """Returns a conversation: a new one, the next turn of an earlier one, or one that diverges from it."""
        kind = random.random()
        if not told or kind < 0.25:
            return ((("system", ("Be brief.",)),) if random.random() < 0.5 else ()) + (self._asked(random),)
        earlier = told[int(random.integers(len(told)))]
        if kind < 0.75:
            return (*earlier, self._asked(random))
        whole = [number for number, (role, _) in enumerate(earlier) if role == "user"]
        at = int(random.choice(whole))
        parts = [
            part for part in earlier[at][1] if isinstance(part, int)
        ]  # the same pictures, another question
        return (*earlier[:at], ("user", (*parts, str(random.choice(_WORDS)))))

    def _asked(self, random: np.random.Generator) -> Turn:
        parts: list[Part] = []
        for _ in range(int(random.choice([0, 1, 1, 2]))):
            parts.append(int(random.integers(len(PICTURES))))
            if random.random() < 0.3:
                parts.append(str(random.choice(_WORDS)))
        if not parts or isinstance(parts[-1], int):
            parts.append(str(random.choice(_WORDS)))
        return "user", tuple(parts)
