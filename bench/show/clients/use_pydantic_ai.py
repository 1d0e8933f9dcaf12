"""pydantic-ai: agents that chat, stream, call a tool by themselves, have an output type, and go on."""

from __future__ import annotations

import asyncio
from typing import Any

import checks
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(
    checks.MODEL, provider=OpenAIProvider(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
)


class Report(BaseModel):
    city: str
    degrees: int


def chat() -> str:
    return checks.said(Agent(model).run_sync(checks.ASK).output)


def stream() -> str:
    async def parts() -> list[str]:
        async with Agent(model).run_stream(checks.ASK) as result:
            return [part async for part in result.stream_text(delta=True, debounce_by=None)]

    return checks.streamed(asyncio.run(parts()))


def tool() -> str:
    cities: list[str] = []
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        cities.append(city)
        return checks.TOOL_RESULT

    checks.said(agent.run_sync(checks.ASK_TOOL).output, checks.TOOL_RESULT)
    [city] = cities
    return checks.called(checks.TOOL, city)


def structured() -> str:
    report = Agent(model, output_type=NativeOutput(Report)).run_sync(checks.ASK_JSON).output
    return checks.reported(report.city, report.degrees)


def structured_by_call() -> str:
    report = Agent(model, output_type=Report).run_sync(checks.ASK_JSON).output
    return checks.reported(report.city, report.degrees)


def second_turn() -> str:
    agent = Agent(model, system_prompt=checks.LONG)
    first = agent.run_sync(checks.ASK)
    second: Any = agent.run_sync(checks.ASK, message_history=first.all_messages())
    usage = second.new_messages()[-1].usage
    return checks.share(usage.cache_read_tokens, usage.input_tokens)


checks.run([chat, stream, tool, structured, structured_by_call, second_turn])
