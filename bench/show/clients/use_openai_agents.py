"""openai-agents over the Responses API, its default, and over chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import checks
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from openai.types.shared import Reasoning

set_tracing_disabled(True)
cities: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Tells the weather."""
    cities.append(city)
    return checks.TOOL_RESULT


def checks_of(api: type[Any], prefix: str) -> list[Any]:
    def agent(**fields: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)
        return Agent(name="driver", model=api(model=checks.MODEL, openai_client=client), **fields)

    def chat() -> str:
        return checks.said(str(Runner.run_sync(agent(), checks.ASK).final_output))

    def stream() -> str:
        async def parts() -> list[str]:
            events = Runner.run_streamed(agent(), checks.ASK).stream_events()
            return [
                event.data.delta
                async for event in events
                if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
            ]

        return checks.streamed(asyncio.run(parts()))

    def tool() -> str:
        cities.clear()
        result = Runner.run_sync(agent(tools=[get_weather]), checks.ASK_TOOL)
        checks.said(str(result.final_output), checks.TOOL_RESULT)
        [city] = cities
        return checks.called(checks.TOOL, city)

    def tool_streamed() -> str:
        async def answer() -> str:
            result = Runner.run_streamed(agent(tools=[get_weather]), checks.ASK_TOOL)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

        cities.clear()
        checks.said(asyncio.run(answer()), checks.TOOL_RESULT)
        [city] = cities
        return checks.called(checks.TOOL, city)

    def structured() -> str:
        report = Runner.run_sync(agent(output_type=checks.Report), checks.ASK_JSON).final_output
        return checks.parsed(report)

    def second_turn() -> str:
        one = agent(instructions=checks.rules(prefix), tools=[get_weather])
        first = Runner.run_sync(one, checks.ASK_TOOL)
        return share_of(Runner.run_sync(one, going_on(first)))

    def going_on(result: Any) -> Any:
        return [*result.to_input_list(), {"role": "user", "content": checks.ASK}]

    def share_of(result: Any) -> str:
        usage = result.raw_responses[-1].usage
        return checks.share(usage.input_tokens_details.cached_tokens, usage.input_tokens)

    def image_second_turn() -> str:
        one = agent(instructions=checks.rules(f"{prefix} with an image"))
        image = {"type": "input_image", "image_url": checks.IMAGE_URL, "detail": "auto"}
        asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": checks.ASK}, image]}]
        first = Runner.run_sync(one, asked)
        checks.said(str(first.final_output), checks.SEES)
        second = Runner.run_sync(one, going_on(first))
        checks.said(str(second.final_output), checks.SEES)
        return share_of(second)

    def effort() -> str:
        one = agent(model_settings=ModelSettings(reasoning=Reasoning(effort="high")))
        return checks.said(str(Runner.run_sync(one, checks.ASK).final_output), checks.THINKS_HIGH)

    found = [chat, stream, tool, tool_streamed, structured, second_turn, image_second_turn, effort]
    for check in found:
        check.__name__ = prefix + check.__name__
    return found


checks.run([*checks_of(OpenAIResponsesModel, ""), *checks_of(OpenAIChatCompletionsModel, "chat_api_")])
