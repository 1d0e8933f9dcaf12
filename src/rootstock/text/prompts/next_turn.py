"""The known beginning of a conversation's next request: up to the next message, with the answer as history.

A template may drop the reasoning of an answer, write its calls anew, or close the turn in another way than the model
did. The next request then has to compute the answer again, unless idle work has done it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rootstock.cache.longest_match import common_prefix
from rootstock.cache.types import Tokens
from rootstock.text.conversation.template import template_input
from rootstock.text.conversation.types import (
    Conversation,
    Message,
    MessagePart,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)
from rootstock.text.limits import refuse_surrogates
from rootstock.text.output.deltas import WholeAnswer
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, escaped
from rootstock.text.prompts.same_call import returned_calls
from rootstock.text.prompts.splicing import Asker
from rootstock.text.prompts.tenant_salt import PromptOwner

_WORD = "Kestrel7391"  # stands for the next message: no template trims or escapes it
_MESSAGES = ("Go on.", "7 of 9", "I")  # the known beginning ends where these begin to differ


def known_prefixes(
    conversation: Conversation,
    answer: WholeAnswer,
    tokenizer: PromptTokenizer,
    owner: PromptOwner,
    *,
    parse: bool = False,
) -> list[Tokens]:
    """Returns the beginning of the next request: one prefix, or two if clients return the answer in two ways.

    Renders and tokenizes: not for an event loop. Raises RequestError.
    """
    found: list[Tokens] = []
    for messages in _continuations(conversation, answer):
        options = {
            name: value for name, value in conversation.options.items() if name != "continue_final_message"
        }
        longer = replace(conversation, messages=[*conversation.messages, *messages], options=options)
        prefix = _up_to_next_message(longer, tokenizer, owner, parse=parse)
        if len(prefix) and not any(np.array_equal(prefix, other) for other in found):
            found.append(prefix)
    return found


def _continuations(conversation: Conversation, answer: WholeAnswer) -> Iterator[list[Message]]:
    if not conversation.messages or conversation.messages[-1].role == "assistant":
        return  # the answer continues a message that the client began
    calls = answer.calls if conversation.tool_choice.parallel else answer.calls[:1]
    parts: list[MessagePart] = [Text(answer.text)] if answer.text or not calls else []
    parts += [ToolCall(call.id, call.name, call.arguments) for call in calls]
    next_one = Message("user", (Text(_WORD),))
    if calls:
        # The first result alone: no later text is known.
        next_one = Message("tool", (ToolResult(calls[0].id, (Text(_WORD),), calls[0].name),))
    for sends_reasoning in _sends_reasoning(conversation) if answer.reasoning else (False,):
        reasoning: list[MessagePart] = [Reasoning(answer.reasoning)] if sends_reasoning else []
        yield [Message("assistant", (*reasoning, *parts)), next_one]


def _sends_reasoning(conversation: Conversation) -> tuple[bool, ...]:
    """Tells whether the client sends reasoning back, as its history shows. Without a history, both are possible."""
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if not answers:
        return True, False
    return (any(isinstance(part, Reasoning) for message in answers for part in message.parts),)


def _up_to_next_message(
    conversation: Conversation, tokenizer: PromptTokenizer, owner: PromptOwner, *, parse: bool
) -> Tokens:
    template = escaped(template_input(conversation, tokenizer.model_tokenizer), tokenizer, parse=parse)
    rendered = template.render(tokenizer.model_tokenizer)
    refuse_surrogates(rendered, "messages")
    before, word, after = rendered.rpartition(_WORD)
    if not word:
        return np.empty(0, np.int32)
    asker = Asker(owner, returned_calls(template.messages))
    texts = [tokenizer.chat_tokens(before + message + after, asker) for message in _MESSAGES]
    return texts[0][: min(common_prefix(texts[0], other) for other in texts[1:])].copy()
