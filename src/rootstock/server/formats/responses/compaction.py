"""Compaction: the model summarizes a conversation, and one sealed item stands for the items that it replaces.

Messages of the user, the system and the developer stay as they are. The model's answers, its reasoning, its calls and
their results are left out of later prompts, which show the summary in their place. The request for the summary ends
the conversation's own prompt, so that the cache has nearly all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rootstock.errors import InvalidParameter
from rootstock.server.formats.responses.output import Event, OutputSettings
from rootstock.server.wire.api_call import Json
from rootstock.text.output.deltas import CallEnded, ContentDelta, Delta, DeltaParser, ReasoningDelta

TRIGGER = "compaction_trigger"  # the last item of an input whose answer is a compaction
KINDS = frozenset(
    {"compaction", "compaction_summary", "context_compaction"}
)  # Codex has used all of these names
MAX_SUMMARY_TOKENS = 8_192  # unless the request has a limit: a summary is made to be short

REQUEST = (
    "Write a summary of this conversation, because it must go on without its earlier messages. You will see the "
    "user's messages and this summary, and nothing else of it. Say what the user wants, what you have decided and "
    "why, what you have done and found (names of files, commands, values and errors, as they are), what is left to "
    "do, and the next step. Do not call a tool. Write nothing but the summary."
)
_HEAD = "The earlier part of this conversation is left out. This is your summary of it. Go on from here.\n\n"
_LOST = (
    "The earlier part of this conversation is left out, and its summary cannot be read any more: ask the user for "
    "what you need."
)

Placed = tuple[Any, str]  # an item, and its path in the request


def shown(summary: str | None) -> str:
    """Returns the text that a prompt shows for a compaction; None: this server cannot open it."""
    return _LOST if summary is None else _HEAD + summary


def without_compacted(items: Sequence[Placed], kinds: Sequence[str]) -> Iterator[Placed]:
    """Yields the items without those that the last compaction replaces. `kinds` are their types."""
    last = max((at for at, kind in enumerate(kinds) if kind in KINDS), default=0)
    for at, (placed, kind) in enumerate(zip(items, kinds, strict=True)):
        if at >= last or stays(placed[0], kind):
            yield placed


def stays(item: Json, kind: str) -> bool:
    """Returns whether an item stays beside the compaction of its conversation."""
    return kind == "additional_tools" or (kind == "message" and item.get("role") != "assistant")


def refuse_trigger(path: str) -> None:
    """Raises InvalidParameter."""
    raise InvalidParameter(f"{path}.type", TRIGGER, "the last item of 'input'")


class CompactedOutput:
    """The output of a compaction: one item, which is made when the summary is complete. It has the form of Output."""

    def __init__(self, settings: OutputSettings, parser: DeltaParser) -> None:
        self.items: list[Json] = []
        self._settings = settings
        self._parser = parser
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def push(self, text: str, logprob: Json | None = None) -> list[Event]:
        self._add(self._parser.push(text))
        return []

    def finish(self, text: str, complete: bool) -> list[Event]:
        self._add([*self._parser.push(text), *self._parser.finish()])
        # A model that was stopped while it reasoned has written the summary there, if anywhere.
        summary = "".join(self._texts).strip() or "".join(self._thoughts).strip()
        assert self._settings.seal is not None
        sealed = self._settings.seal(summary)
        item = {"id": self._settings.item_id("cmp", 0), "type": "compaction", "encrypted_content": sealed}
        self.items = [item]
        place = {"output_index": 0, "item": item}
        return [("response.output_item.added", place), ("response.output_item.done", place)]

    def so_far(self) -> list[Json]:
        return self.items

    def _add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    self._texts.append(text)
                case CallEnded(_, _, raw):  # of a model that calls a tool all the same
                    self._texts.append(raw)
                case ReasoningDelta(text):
                    self._thoughts.append(text)
