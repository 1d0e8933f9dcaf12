"""litellm: chat completions and responses, with the provider for OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any

import checks
import litellm

SERVER: Any = {
    "model": f"openai/{checks.MODEL}",
    "api_base": f"{checks.URL}/v1",
    "api_key": checks.KEY,
    "num_retries": 0,
}


def ask(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(**SERVER, messages=messages, **fields)


def tool_streamed() -> str:
    messages = [{"role": "user", "content": checks.ASK_TOOL}]
    chunks = list(ask(messages, tools=checks.TOOLS, stream=True))
    whole: Any = litellm.stream_chunk_builder(chunks, messages=messages)
    return checks.call_in(whole.choices[0].message)


def structured() -> str:
    answer = ask([{"role": "user", "content": checks.ASK_JSON}], response_format=checks.Report)
    return checks.parsed(checks.Report.model_validate_json(answer.choices[0].message.content))


def responses() -> str:
    answer: Any = litellm.responses(**SERVER, input=checks.ASK)
    return checks.said(answer.output_text)


checks.run([*checks.of_chat_completions(ask), tool_streamed, structured, responses])
