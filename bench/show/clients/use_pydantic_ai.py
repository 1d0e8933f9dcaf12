"""pydantic-ai: agents that chat, stream, call a tool by themselves, have an output type, get an image, and go on."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import checks
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(
    checks.MODEL, provider=OpenAIProvider(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
)


def chat() -> str:
    return checks.said(Agent(model).run_sync(checks.ASK).output)


def stream() -> str:
    async def parts() -> list[str]:
        async with Agent(model).run_stream(checks.ASK) as result:
            return [part async for part in result.stream_text(delta=True, debounce_by=None)]

    return checks.streamed(asyncio.run(parts()))


def with_weather(cities: list[str], **fields: Any) -> Any:
    """Makes an agent whose tool adds to the cities."""
    agent: Any = Agent(model, **fields)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        cities.append(city)
        return checks.TOOL_RESULT

    return agent


def tool() -> str:
    cities: list[str] = []
    checks.said(with_weather(cities).run_sync(checks.ASK_TOOL).output, checks.TOOL_RESULT)
    [city] = cities
    return checks.called(checks.TOOL, city)


def tool_streamed() -> str:
    cities: list[str] = []

    async def answer() -> str:
        async with with_weather(cities).run_stream(checks.ASK_TOOL) as result:
            return str(await result.get_output())

    checks.said(asyncio.run(answer()), checks.TOOL_RESULT)
    [city] = cities
    return checks.called(checks.TOOL, city)


def structured() -> str:
    report = Agent(model, output_type=NativeOutput(checks.Report)).run_sync(checks.ASK_JSON).output
    return checks.parsed(report)


def structured_by_call() -> str:
    report = Agent(model, output_type=checks.Report).run_sync(checks.ASK_JSON).output
    return checks.parsed(report)


def structured_by_prompt() -> str:
    return checks.parsed(
        Agent(model, output_type=PromptedOutput(checks.Report)).run_sync(checks.ASK_JSON).output
    )


def second_turn() -> str:
    agent = with_weather([], system_prompt=checks.rules())
    first = agent.run_sync(checks.ASK_TOOL)
    return share_of(agent.run_sync(checks.ASK, message_history=first.all_messages()))


def share_of(result: Any) -> str:
    usage = result.new_messages()[-1].usage
    return checks.share(usage.cache_read_tokens, usage.input_tokens)


def image_second_turn() -> str:
    agent = Agent(model, system_prompt=checks.rules())
    image = BinaryContent(base64.b64decode(checks.IMAGE), media_type=checks.IMAGE_TYPE)
    first = agent.run_sync([checks.ASK, image])
    checks.said(first.output, checks.SEES)
    second = agent.run_sync(checks.ASK, message_history=first.all_messages())
    checks.said(second.output, checks.SEES)
    return share_of(second)


def effort() -> str:
    settings = OpenAIChatModelSettings(openai_reasoning_effort="high")
    return checks.said(Agent(model, model_settings=settings).run_sync(checks.ASK).output, checks.THINKS_HIGH)


checks.run(
    [
        chat,
        stream,
        tool,
        tool_streamed,
        structured,
        structured_by_call,
        structured_by_prompt,
        second_turn,
        image_second_turn,
        effort,
    ]
)
