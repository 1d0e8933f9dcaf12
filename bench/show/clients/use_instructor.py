"""instructor: chat, an object by each of its modes, streams of partial objects, image, effort, cached shares."""

from __future__ import annotations

from typing import Any

import checks
import instructor
from openai import OpenAI


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0), mode=mode
    )


def ask(messages: list[Any], **fields: Any) -> Any:
    return client(instructor.Mode.TOOLS).chat.completions.create(
        model=checks.MODEL, messages=messages, response_model=None, **fields
    )


def chat() -> str:
    return checks.said(ask([{"role": "user", "content": checks.ASK}]).choices[0].message.content)


def effort() -> str:
    answer = ask([{"role": "user", "content": checks.ASK}], reasoning_effort="high")
    return checks.said(answer.choices[0].message.content, checks.THINKS_HIGH)


def image_second_turn() -> str:
    image = instructor.Image.from_base64(checks.IMAGE_URL)
    messages: list[Any] = [
        {"role": "system", "content": checks.rules("with an image")},
        {"role": "user", "content": [checks.ASK, image]},
    ]
    said = checks.said(ask(messages).choices[0].message.content, checks.SEES)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": checks.ASK}]
    answer = ask(messages)
    checks.said(answer.choices[0].message.content, checks.SEES)
    return share_of(answer.usage)


def share_of(usage: Any) -> str:
    return checks.share(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)


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
    return share_of(asked().usage)


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON)
checks.run(
    [
        chat,
        *map(structured_in, MODES),
        *map(streamed_in, MODES[:2]),
        second_turn,
        image_second_turn,
        effort,
    ]
)
