"""Volatile lines at the head of the system prompt are dropped, and nothing else is."""

from __future__ import annotations

from rootstock.text.conversation.types import Conversation, Message, PrefixMark, Text
from rootstock.text.conversation.volatile_heads import DroppedHead, without_volatile_heads

LINE = "x-anthropic-billing-header: cc_version=1.2.3.4a5; cc_entrypoint=cli;"
BEGINS = "x-anthropic-billing-header:"
USER = Message("user", (Text("Hi"),))


def system(*texts: str) -> Message:
    return Message("system", tuple(map(Text, texts)))


def dropped(*messages: Message) -> tuple[list[Message], tuple[DroppedHead, ...]]:
    conversation, told = without_volatile_heads(Conversation(messages))
    return list(conversation.messages), told


def test_a_block_of_the_system_prompt_is_dropped() -> None:
    head = (DroppedHead(BEGINS, len(LINE)),)
    assert dropped(system(LINE, "You help."), USER) == ([system("You help."), USER], head)
    assert dropped(system(LINE), USER) == ([USER], head)
    assert dropped(system("You help."), system(LINE), USER) == ([system("You help."), USER], head)
    assert "Dropped 68 characters of a volatile block" in str(head[0])


def test_a_text_that_goes_on_after_the_line_keeps_the_rest_and_its_mark() -> None:
    message = Message("system", (Text(f"{LINE}\n\nYou help.\n", mark=PrefixMark("")),))
    found, told = dropped(message, USER)
    assert found[0].parts == (Text("You help.\n", mark=PrefixMark("")),)
    assert told == (DroppedHead(BEGINS, len(LINE) + 2),)


def test_other_messages_and_other_texts_stay() -> None:
    quoted = Message("user", (Text(LINE),))
    for messages in ([system(f"About {LINE}"), USER], [quoted], [USER, system(LINE)], [system(" " + LINE)]):
        assert dropped(*messages) == (messages, ())
