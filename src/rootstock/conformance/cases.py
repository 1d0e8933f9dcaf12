"""Cases: what clients do to a prompt cache. Each is a function that talks with the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootstock.conformance.server import Answer, Json
from rootstock.conformance.talk import Talk, completion
from rootstock.conformance.texts import HARD_TEXTS

LONG_ANSWER = 96


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    about: str
    run: Callable[[Talk], None]


def _case(name: str) -> Callable[[Callable[[Talk], None]], Callable[[Talk], None]]:
    def register(run: Callable[[Talk], None]) -> Callable[[Talk], None]:
        assert run.__doc__ is not None
        CASES[name] = Case(name, " ".join(run.__doc__.split()), run)
        return run

    return register


CASES: dict[str, Case] = {}


@_case("again")
def again(talk: Talk) -> None:
    """The same prompt again, whole and streamed, in three lengths."""
    for size in (0.1, 1.0, 3.0):
        chat = talk.chat(size)
        talk.ask(chat, "first")
        talk.ask(chat, "again")
        talk.ask(chat, "again, streamed", stream=True)
        talk.ask(chat.with_fields(max_tokens=1), "again, one token")


@_case("between")
def between(talk: Talk) -> None:
    """A, B and A again; then turns of both, one after the other."""
    one, other = talk.chat(), talk.chat()
    for chat in (one, other, one, other):
        talk.ask(chat, "after another conversation" if chat is other else "A, B, A")
    for round_ in range(2):
        for _ in range(2):
            one, other = other, one
            answer = talk.ask(one, f"turn {round_ + 1}, beside another conversation")
            one = one.answered(answer).user(talk.words(0.2))


@_case("turns")
def turns(talk: Talk) -> None:
    """A conversation of five turns; then an earlier turn, another last message, and another first one."""
    chat = talk.chat()
    seen = [chat]
    for number in range(5):
        answer = talk.ask(chat, f"turn {number + 1}")
        chat = chat.answered(answer).user(talk.words(0.3))
        seen.append(chat)
    talk.ask(seen[1], "an earlier turn: a prefix of what was sent")
    talk.ask(seen[3].edited(-1, talk.words(0.3)), "the last message edited")
    talk.ask(seen[4].edited(1, talk.words(0.3)), "the first message edited")
    talk.ask(seen[4], "the conversation as it was")


@_case("cuts")
def cuts(talk: Talk) -> None:
    """Prompts that end inside of one that was sent, and go on differently, word by word."""
    words = talk.words(2.0).split()
    chat = talk.chat(0.3)
    talk.ask(chat.edited(-1, " ".join(words)), "first")
    lengths = {len(words) - 1, len(words) - 2, len(words) - 3, 1, 2, *talk.samples(range(3, len(words)), 8)}
    for length in sorted(lengths, reverse=True):
        talk.ask(chat.edited(-1, " ".join(words[:length])), f"the first {length} words of {len(words)}")
    for length in talk.samples(range(3, len(words)), 3):
        other = [*words[:length], talk.words(0.1), *words[length + 1 :]]
        talk.ask(chat.edited(-1, " ".join(other)), f"word {length + 1} replaced")
    talk.ask(chat.edited(-1, " ".join(words)), "again")


@_case("token_ids")
def token_ids(talk: Talk) -> None:
    """Completions of token ids that end at, before and behind the edges of blocks."""
    ids = talk.some_ids(320)
    talk.ask(completion(ids), "first")
    edges = [edge + by for edge in (16, 32, 64, 128, 256) for by in (-1, 0, 1)]
    for length in talk.samples(edges, 9):
        talk.ask(completion(ids[:length]), f"the first {length} of {len(ids)} ids")
        talk.ask(completion([*ids[:length], *ids[: 1 + length % 7]]), f"other ids behind {length}")
    talk.ask(completion([*ids, *ids[:5]]), "five ids more")
    talk.ask(completion(ids), "again")


@_case("foreign_text")
def foreign_text(talk: Talk) -> None:
    """Scripts, emoji, names of special tokens and white space, first, again and continued."""
    for text in HARD_TEXTS:
        chat = talk.chat(0.2).edited(-1, text)
        talk.ask(chat, "first")
        answer = talk.ask(chat, "again")
        talk.ask(chat.answered(answer).user(text[: len(text) // 2]), "continued by a part of it")
        talk.ask(chat.edited(-1, text[: len(text) * 2 // 3]), "cut inside")


@_case("system_messages")
def system_messages(talk: Talk) -> None:
    """A system message in the middle of a conversation, changed, and gone again."""
    chat = talk.chat()
    chat = chat.answered(talk.ask(chat, "first")).user(talk.words(0.2))
    answer = talk.ask(chat, "second turn")
    plain = chat.answered(answer)
    later = plain.system(talk.words(0.2)).user(talk.words(0.1))
    talk.ask(later, "a system message in the middle")
    talk.ask(later, "again")
    talk.ask(plain.system(talk.words(0.2)).user(talk.words(0.1)), "another system message there")
    talk.ask(plain.user(talk.words(0.1)), "without it")
    talk.ask(chat.edited(0, talk.words(0.3)), "another first system message")


@_case("reasoning")
def reasoning(talk: Talk) -> None:
    """Reasoning in the history, dropped, and put back, as clients do."""
    chat = talk.chat()
    answer = talk.ask(chat, "first")
    thought = talk.words(0.2)
    with_it = chat.message({**answer.as_message(), "reasoning_content": thought}).user(talk.words(0.2))
    without = chat.answered(Answer(answer.text)).user(str(with_it.messages[-1]["content"]))
    talk.ask(with_it, "with the reasoning of the last turn")
    talk.ask(without, "reasoning dropped")
    talk.ask(with_it, "put back")
    talk.ask(without.answered(Answer("done")).user("go on"), "dropped, one turn later")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Returns the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place", "days"],
            },
        },
    }
    for name in ("weather", "traffic", "tides")
]


@_case("tool_calls")
def tool_calls(talk: Talk) -> None:
    """Calls whose arguments come back in another order, with other white space and other ids."""
    chat = talk.chat().with_fields(tools=TOOLS)
    answer = talk.ask(chat, "first")
    arguments: Json = {"place": "Füssen", "days": 3}
    written = (
        json.dumps(arguments),
        json.dumps(arguments, separators=(",", ":"), ensure_ascii=False),
        json.dumps(dict(reversed(arguments.items())), indent=1),
        json.dumps(arguments),
    )
    for number, text in enumerate(written):
        called = Answer(answer.text, calls=(("weather", text),)).as_message()
        called["tool_calls"][0]["id"] = f"call_{number:09}"
        history = chat.message(called).message(
            {"role": "tool", "tool_call_id": f"call_{number:09}", "content": "rain, 12 degrees"}
        )
        talk.ask(history, f"the call as written the {number + 1}. time")
        talk.ask(history, "again")
    real = talk.ask(
        chat.with_fields(tool_choice="required", max_tokens=64), "a call of the model", optional=True
    )
    if real.calls:
        talk.ask(chat.answered(real).results(real, "sun"), "its result")
        talk.ask(chat.answered(_rewritten(real)).results(real, "sun"), "its result, the call written anew")


def _rewritten(answer: Answer) -> Answer:
    """Returns an answer whose calls went through another JSON library."""
    try:
        calls = tuple((name, json.dumps(json.loads(text), sort_keys=True)) for name, text in answer.calls)
    except ValueError:
        calls = answer.calls
    return Answer(answer.text, answer.reasoning, calls)


@_case("tools_changed")
def tools_changed(talk: Talk) -> None:
    """Tools that come, go and change their order between the turns."""
    chat = talk.chat()
    lists: tuple[list[Any], ...] = (TOOLS[:2], TOOLS, TOOLS[::-1], TOOLS[:1], TOOLS[:2])
    for number, tools in enumerate(lists):
        talk.ask(chat.with_fields(tools=tools), f"tools of list {number + 1}")
    talk.ask(chat, "no tools")


@_case("at_once")
def at_once(talk: Talk) -> None:
    """Equal prompts at once, continuations of one at once, and different prompts at once."""
    new, warm = talk.chat(2.0), talk.chat()
    talk.ask_at_once([new] * 4, "new, four times at once")
    answer = talk.ask(warm, "first")
    base = warm.answered(answer)
    talk.ask_at_once([base.user(talk.words(0.2)) for _ in range(4)], "continued in four ways at once")
    talk.ask_at_once([warm, new, talk.chat(), talk.chat(0.2), warm], "different prompts at once")
    talk.ask(new, "again, alone")
    talk.ask(warm, "again, alone")


@_case("cancelled")
def cancelled(talk: Talk) -> None:
    """Streams that the client closes, before and after the first tokens; then the same prompt and its next turn."""
    for chunks in (0, 1, 3):
        chat = talk.chat(2.0).with_fields(max_tokens=LONG_ANSWER)
        talk.cancel(chat, chunks)
        short = chat.with_fields(max_tokens=talk.answer_tokens)
        answer = talk.ask(short, f"after a stream that was closed behind {chunks} chunks")
        talk.ask(short.answered(answer).user(talk.words(0.2)), "its next turn")


@_case("long_answers")
def long_answers(talk: Talk) -> None:
    """A long answer, its next turn, and the long answer again."""
    chat = talk.chat().with_fields(max_tokens=LONG_ANSWER)
    answer = talk.ask(chat, "first")
    following = chat.answered(answer).user(talk.words(0.2))
    talk.ask(following, "the next turn")
    talk.ask(chat, "the long answer again")
    half = Answer(answer.text[: len(answer.text) // 2])
    talk.ask(chat.answered(half).user(talk.words(0.2)), "half of the answer kept")
    talk.ask(following, "the next turn again")


@_case("sampled")
def sampled(talk: Talk) -> None:
    """An answer drawn with a seed: first, again, and after another conversation."""
    chat = talk.chat().with_fields(temperature=0.8, seed=7)
    talk.needs_repeatable(chat)
    talk.ask(chat, "first")
    talk.ask(chat, "again")
    talk.ask(talk.chat(), "another conversation")
    talk.ask(chat, "after another conversation")


@_case("constrained")
def constrained(talk: Talk) -> None:
    """An answer that a JSON schema constrains: first, again, and continued."""
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "open": {"type": "boolean"}},
        "required": ["size", "open"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "shop", "schema": schema, "strict": True}}
    chat = talk.chat().with_fields(response_format=wanted, max_tokens=48)
    answer = talk.ask(chat, "first", optional=True)
    talk.ask(chat, "again")
    talk.ask(chat.answered(answer).user(talk.words(0.1)), "continued")
    talk.ask(chat.without("response_format"), "without the schema")


@_case("choices")
def choices(talk: Talk) -> None:
    """Two choices of one prompt, new and known: both are the answer."""
    chat = talk.chat()
    talk.ask(chat.with_fields(n=2), "two choices, new", optional=True)
    talk.ask(chat.with_fields(n=2), "two choices, known")
    talk.ask(chat, "one choice")


@_case("pressure")
def pressure(talk: Talk) -> None:
    """Conversations that come back after many others."""
    mine = [talk.chat() for _ in range(3)]
    answers = [talk.ask(chat, "first") for chat in mine]
    for _ in range(talk.pressure):
        talk.ask(talk.chat(3.0), "another conversation")
    for chat, answer in zip(mine, answers, strict=True):
        talk.ask(chat.answered(answer).user(talk.words(0.2)), "the next turn, after many others")
        talk.ask(chat, "again, after many others")


@_case("salts")
def salts(talk: Talk) -> None:
    """Equal prompts with different values of cache_salt: neither finds the other's."""
    chat = talk.chat(2.0)
    first, second = chat.with_fields(cache_salt=talk.nonce()), chat.with_fields(cache_salt=talk.nonce())
    talk.ask(first, "with a salt", optional=True)
    talk.ask(first, "again with it")
    talk.ask(second, "with another salt")
    talk.ask(chat, "without a salt")
    talk.ask(second, "with the other salt again")


@_case("restart")
def restart(talk: Talk) -> None:
    """A conversation before and after a restart of the server."""
    chat = talk.chat(2.0)
    answer = talk.ask(chat, "first")
    following = chat.answered(answer).user(talk.words(0.2))
    talk.ask(following, "second turn")
    for number in range(2):
        talk.restart()
        talk.ask(chat, f"after restart {number + 1}")
        talk.ask(following, f"second turn after restart {number + 1}")
        talk.ask(following.edited(-1, talk.words(0.2)), f"another second turn after restart {number + 1}")
