"""instructor: a chat, an object by each of its modes, streams of partial objects, the cached share of a turn."""

from __future__ import annotations

from typing import Any

import checks
import instructor
from openai import OpenAI


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0), mode=mode
    )


def chat() -> str:
    answer = client(instructor.Mode.TOOLS).chat.completions.create(
        model=checks.MODEL,
        messages=[{"role": "user", "content": checks.ASK}],
        response_model=None,
    )
    return checks.said(answer.choices[0].message.content)


def structured_in(mode: instructor.Mode) -> checks.Check:
    def structured() -> str:
        report = client(mode).chat.completions.create(
            model=checks.MODEL,
            messages=[{"role": "user", "content": checks.ASK_JSON}],
            response_model=checks.Report,
            max_retries=0,
        )
        return checks.parsed(report)

    structured.__name__ = f"structured_{mode.name.lower()}"
    return structured


def streamed_in(mode: instructor.Mode) -> checks.Check:
    def stream() -> str:
        parts = client(mode).chat.completions.create_partial(
            model=checks.MODEL,
            messages=[{"role": "user", "content": checks.ASK_JSON}],
            response_model=checks.Report,
            max_retries=0,
        )
        *before, last = parts
        assert before, "the stream has one piece"
        return checks.reported(last.city, last.degrees)

    stream.__name__ = f"stream_{mode.name.lower()}"
    return stream


def second_turn() -> str:
    messages: list[Any] = [
        {"role": "system", "content": checks.rules()},
        {"role": "user", "content": checks.ASK_JSON},
    ]
    asker = client(instructor.Mode.JSON_SCHEMA).chat.completions

    def asked() -> Any:
        return asker.create_with_completion(
            model=checks.MODEL, messages=messages, response_model=checks.Report, max_retries=0
        )[1]

    messages += [
        {"role": "assistant", "content": asked().choices[0].message.content},
        {"role": "user", "content": checks.ASK_JSON},
    ]
    usage = asked().usage
    return checks.share(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON)
checks.run([chat, *map(structured_in, MODES), *map(streamed_in, MODES[:2]), second_turn])
