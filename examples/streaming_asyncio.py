"""Stream answers to several tasks, and cancel one: python examples/streaming_asyncio.py [MODEL]"""

import asyncio
import sys

from rootstock import LLM, SamplingParams
from rootstock.bench.tiny_model import ensure_tiny_model

model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_tiny_model())


async def ask(llm: LLM, name: str, question: str) -> str:
    """Prints the pieces of an answer as they come. Requests of all tasks run in one batch."""
    text = ""
    async for piece in llm.achat_stream(
        [{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=20)
    ):
        text += piece.text
        print(f"{name}: {piece.text!r}", flush=True)
    return text


async def ask_and_leave(llm: LLM) -> None:
    """Cancels a long answer after its first piece. The engine stops it, and keeps its computed tokens cached."""
    started = asyncio.Event()

    async def long_answer() -> None:
        async for _ in llm.astream("Once upon a time", SamplingParams(ignore_eos=True)):
            started.set()

    task = asyncio.create_task(long_answer())
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    print("cancelled")


async def main() -> None:
    async with LLM(model, max_model_len=2048) as llm:
        first, second, _ = await asyncio.gather(
            ask(llm, "first", "What is on shelf four?"),
            ask(llm, "second", "Who wrote the last line?"),
            ask_and_leave(llm),
        )
        print(f"first: {first!r}\nsecond: {second!r}")


asyncio.run(main())
