"""Template boundaries: the positions of a chat's prompt at which later requests can diverge from it.

They are found by rendering probable next requests: another conversation under the same system prompt, the next turn
after an answer with reasoning, a tool's result. A later request diverges where such a rendering does. In this way a
template that drops reasoning from the history shows the position itself: no template is parsed, no model is named. A
rendering that the template refuses yields no position.

The renderings leave out most of a long history and most of the tools. The position is then located in the whole
prompt by the text around it. If that text is absent or occurs twice, the whole conversation is rendered. A wrong
position would waste a checkpoint and never change an answer: requests share a prefix only if its tokens are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from rootstock.cache.radix_node import NEAR_TOKENS, Boundary, CheckpointKind
from rootstock.errors import ChatTemplateFailed
from rootstock.text.conversation.template import TemplateInput
from rootstock.text.prompts.prompt_tokenizer import (
    ChatPrompt,
    PlacedMark,
    PromptTokenizer,
    placed_chat,
)
from rootstock.text.prompts.tenant_salt import PromptOwner
from rootstock.text.prompts.text_alignment import common_chars, common_tokens
from rootstock.text.tokenizer import Message, ModelTokenizer, PlacedTokens, Tool

_WHOLE_UP_TO = 10  # messages: shorter conversations are rendered as they are
_CONTEXT_CHARS = 64  # around a place: equal context identifies it in another text
_SENTINEL = "\ue000"  # private use: hardly any text has it

_CALL_ID = "call00000"  # the strictest templates want nine characters


def boundaries_of(
    tokenizer: ModelTokenizer, conversation: TemplateInput, placed: PlacedTokens
) -> tuple[Boundary, ...]:
    """Returns the boundaries in ascending order, one for each position. `placed` is the conversation's prompt."""
    return _Finder(tokenizer, conversation, placed).boundaries()


def chat_with_boundaries(
    conversation: TemplateInput, tokenizer: PromptTokenizer, owner: PromptOwner
) -> ChatPrompt:
    """Renders and tokenizes like `chat_prompt`, and finds the boundaries: for models that cannot resume anywhere."""
    prompt, placed = placed_chat(conversation, tokenizer, owner)
    finder = _Finder(tokenizer.model_tokenizer, conversation, placed)
    return replace(prompt, boundaries=finder.boundaries(), marks=finder.marks)


def chat_with_marks(
    conversation: TemplateInput, tokenizer: PromptTokenizer, owner: PromptOwner
) -> ChatPrompt:
    """Renders and tokenizes like `chat_prompt`, and finds the places of the client's marks."""
    prompt, placed = placed_chat(conversation, tokenizer, owner)
    return replace(prompt, marks=_Finder(tokenizer.model_tokenizer, conversation, placed).marks)


@dataclass(frozen=True, slots=True)
class _Abridged:
    """The parts of a conversation that decide how a template renders its continuation, and their rendering."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    text: str


class _Finder:
    def __init__(self, tokenizer: ModelTokenizer, conversation: TemplateInput, placed: PlacedTokens) -> None:
        self._tokenizer = tokenizer
        self._conversation = conversation
        self._placed = placed
        options = dict(conversation.options)
        options.pop("continue_final_message", None)  # no rendering of a later request has it
        self._options = options
        self._abridged = self._abridge()
        self._positions: dict[tuple[int, str], int] = {}

    def boundaries(self) -> tuple[Boundary, ...]:
        found: dict[int, CheckpointKind] = {}
        for mark in self.marks:
            if mark.tokens is not None:
                found.setdefault(mark.tokens, CheckpointKind.MARK)
        found.setdefault(self.system, CheckpointKind.SYSTEM)
        for position, kind in self.turns():
            found.setdefault(position, kind)
        return tuple(Boundary(position, found[position]) for position in sorted(found) if position > 0)

    @cached_property
    def system(self) -> int:
        """The position at which another conversation under the same system prompt and tools diverges."""
        messages = self._conversation.messages
        lead = list(takewhile(lambda message: message["role"] == "system", messages))
        if len(lead) == len(messages):
            return 0
        spoken = messages[len(lead)]["content"].lstrip()
        other = {"role": "user", "content": "Yes?" if spoken[:1] != "Y" else "No?"}
        try:
            rendered = self._render([*lead, other], self._conversation.tools)
        except ChatTemplateFailed:
            return 0
        return common_tokens(self._tokenizer, self._placed, rendered)

    def turns(self) -> Iterator[tuple[int, CheckpointKind]]:
        """Yields the positions at which the next turn and the next tool step diverge from the prompt.

        A turn or step that continues the whole prompt diverges at its end.
        """
        after_answers, after_calls = self._continuations()
        next_turn = self._positions_of(after_answers)
        next_step = self._positions_of(after_calls)
        of_tool = self._conversation.messages[-1]["role"] == "tool"
        last = -NEAR_TOKENS
        for position in sorted(next_turn | next_step):
            if position >= last + NEAR_TOKENS:
                last = position
                within_turn = of_tool and any(position > step - NEAR_TOKENS for step in next_step)
                yield position, CheckpointKind.TOOL if within_turn else CheckpointKind.USER

    @cached_property
    def marks(self) -> tuple[PlacedMark, ...]:
        """The client's marks with their positions."""
        marks = self._conversation.marks
        inside = sorted({(mark.message, mark.chars) for mark in marks if mark.message is not None})
        positions = dict(zip(inside, self._marked_positions(inside), strict=False))
        return tuple(
            PlacedMark(
                mark.asked,
                (self.system or None) if mark.message is None else positions.get((mark.message, mark.chars)),
            )
            for mark in marks
        )

    def _marked_positions(self, inside: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Yields the positions of marks within messages, or none if the template rewrites marked text."""
        text = self._placed.text
        if not inside or _SENTINEL in text:
            return
        messages = [dict(message) for message in self._conversation.messages]
        for index, chars in reversed(inside):
            content = messages[index]["content"]
            end = len(content[:chars].rstrip())  # templates trim
            messages[index]["content"] = content[:end] + _SENTINEL + content[end:]
        try:
            rendered = self._tokenizer.render_chat(
                messages, self._conversation.tools, **self._conversation.options
            )
        except ChatTemplateFailed:
            return
        pieces = rendered.split(_SENTINEL)
        if "".join(pieces) != text:  # the template changes the marked text, or writes it twice
            return
        chars = 0
        for piece in pieces[:-1]:
            chars += len(piece)
            yield common_tokens(self._tokenizer, self._placed, text[:chars] + " Q")

    def _continuations(self) -> tuple[list[list[Message]], list[list[Message]]]:
        """Returns messages that may follow: an answer with the next question, and a call with its result.

        Reasoning is a field of its own, part of the content, or absent: clients and templates differ.
        """
        user = {"role": "user", "content": "Go on."}
        if self._conversation.messages[-1]["role"] == "assistant":
            return [[user]], []
        answers: list[Message] = [
            {"role": "assistant", "content": "Done."},
            {"role": "assistant", "content": "Done.", "reasoning_content": "Well."},
            {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nDone."},
        ]
        next_turns: list[list[Message]] = [[answer, user] for answer in answers]
        name = _name_of_a_tool(self._conversation)
        if name is None:
            return next_turns, []
        call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": _CALL_ID, "name": name, "content": "Done."}
        return next_turns, [[calling, result], [{**calling, "reasoning_content": "Well."}, result]]

    def _positions_of(self, continuations: Sequence[Sequence[Message]]) -> set[int]:
        return {
            position
            for continuation in continuations
            if (position := self._position_of(continuation)) is not None
        }

    def _position_of(self, continuation: Sequence[Message]) -> int | None:
        """Returns the position at which the rendered continuation diverges; None if the template refuses it."""
        text = self._placed.text
        try:
            rendered = self._render([*self._abridged.messages, *continuation], self._abridged.tools)
            chars = common_chars(self._abridged.text, rendered)
            place = _place_of(self._abridged.text, chars, text)
            if place is None:
                whole = self._conversation
                rendered = self._render([*whole.messages, *continuation], whole.tools)
                chars = place = common_chars(text, rendered)
        except ChatTemplateFailed:
            return None
        following = rendered[chars : chars + 2 * _CONTEXT_CHARS]
        if (place, following) not in self._positions:
            position = common_tokens(self._tokenizer, self._placed, text[:place] + following)
            self._positions[place, following] = position
        return self._positions[place, following]

    def _abridge(self) -> _Abridged:
        whole = self._conversation
        messages, tools = _abridged_messages(whole.messages), whole.tools[:1]
        if len(messages) == len(whole.messages) and len(tools) == len(whole.tools):
            return _Abridged(messages, tools, self._placed.text)
        try:
            rendered = self._tokenizer.render_chat(messages, tools, **whole.options)
        except ChatTemplateFailed:
            return _Abridged(whole.messages, whole.tools, self._placed.text)
        return _Abridged(messages, tools, rendered)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self._tokenizer.render_chat(messages, tools, **self._options)


def _abridged_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages that templates look at to decide how they render a continuation.

    They are the system prompt, the first question, the answer before the last question, the last question, and the
    first and the last step after it.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(messages) <= _WHOLE_UP_TO or not users:
        return messages
    first, last = users[0], users[-1]
    kept = list(takewhile(lambda message: message["role"] == "system", messages))
    if first < last:
        answers = [message for message in messages[first:last] if message["role"] == "assistant"]
        kept += [messages[first], *map(_without_calls, answers[-1:])]
    steps = [i for i in range(last + 1, len(messages)) if messages[i]["role"] == "assistant"]
    if len(steps) > 2:
        return [*kept, *messages[last : steps[1]], *messages[steps[-1] :]]
    return [*kept, *messages[last:]]


def _without_calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _name_of_a_tool(conversation: TemplateInput) -> str | None:
    """Returns the name of a tool, or None for a conversation without tools and calls."""
    for tool in conversation.tools:
        function = tool.get("function", tool)
        return str(function.get("name", "tool")) if isinstance(function, Mapping) else "tool"
    called = any(message.get("tool_calls") for message in conversation.messages)
    return "tool" if called else None


def _place_of(base: str, chars: int, text: str) -> int | None:
    """Returns the place in `text` with the same context as the place after `chars` of `base`.

    Either both places are ends of their texts, or the context occurs once in `text`; otherwise None.
    """
    if text.endswith(base[max(0, chars - _CONTEXT_CHARS) :]):
        return len(text) - (len(base) - chars)
    after = base[chars : chars + _CONTEXT_CHARS]
    for before in (4 * _CONTEXT_CHARS, _CONTEXT_CHARS):
        context = base[max(0, chars - before) : chars]
        at = text.find(context + after)
        if at >= 0 and text.find(context + after, at + 1) < 0:
            return at + len(context)
    return None
