"""Lean client of streamed completions, in a process of its own, that uses as little processor time as possible.

It has plain sockets, one selector, and no parsing while the clock runs. Lines of JSON on stdin drive it:

    {"prompts": [[1, 2], …], "tokens": 128}  →  {"seconds": …, "first_s": […], "chunks": …, "cpu_s": …, "tokens": …}

With --openai the same requests go through OpenAI's own client, which parses every chunk into objects.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import IO, Any
from urllib.parse import urlsplit

MODEL_PARAMS = {
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
END = b"0\r\n\r\n"  # the last chunk of a chunked body


class ClientProcess:
    """Client process: `with ClientProcess(url) as client: client.ask(prompts, tokens)`. It ends with the block."""

    def __init__(self, url: str, *options: str) -> None:
        self._command = [sys.executable, __file__, url, *options]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ClientProcess:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()  # the end of its work
        self._process.wait(timeout=30)

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Sends all prompts at once, and waits until each stream has ended."""
        assert self._process is not None
        _write(self._process.stdin, {"prompts": prompts, "tokens": tokens})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the client ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def _write(file: IO[str] | None, value: Any) -> None:
    assert file is not None
    file.write(json.dumps(value) + "\n")
    file.flush()


# ---- in the process


class Streams:
    """Streams, each on a connection that is open before the clock starts."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), int(parts.port or 80))

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        used = [socket.create_connection(self._address) for _ in prompts]
        for sock in used:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = [_request(prompt, tokens) for prompt in prompts]
        received = [bytearray() for _ in used]
        first_at = [0.0] * len(used)
        began, began_cpu = time.perf_counter(), time.process_time()
        with selectors.DefaultSelector() as selector:
            for index, (sock, request) in enumerate(zip(used, requests, strict=True)):
                sock.sendall(request)
                selector.register(sock, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    index = key.data
                    piece = used[index].recv(65536)
                    assert piece, f"the server closed stream {index}: {bytes(received[index][-300:])!r}"
                    if not first_at[index] and b"data: " in piece:
                        first_at[index] = time.perf_counter()
                    received[index] += piece
                    if piece.endswith(END):
                        selector.unregister(used[index])
        ended, ended_cpu = time.perf_counter(), time.process_time()
        for sock in used:
            sock.close()
        told = [_told(bytes(each)) for each in received]
        return {
            "seconds": ended - began,
            "first_s": [at - began for at in first_at],
            "cpu_s": ended_cpu - began_cpu,
            "chunks": sum(chunks for chunks, _ in told),
            "tokens": sum(usage["completion_tokens"] for _, usage in told),
            "cached_tokens": sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in told),
        }


def _request(prompt: list[int], tokens: int) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, **MODEL_PARAMS}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _told(received: bytes) -> tuple[int, dict[str, Any]]:
    """Counts the chunks with text, and returns them with the usage. Called after the clock was stopped."""
    assert received.startswith(b"HTTP/1.1 200"), received[:500]
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert b"data: [DONE]" in received
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    usage: dict[str, Any] = chunks[-1]["usage"]
    return sum(bool(chunk["choices"] and chunk["choices"][0]["text"]) for chunk in chunks), usage


async def _ask_openai(url: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    from openai import AsyncOpenAI

    extra = {"ignore_eos": True}

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def one(prompt: list[int]) -> tuple[int, int, int]:
            chunks, usage = 0, None
            stream = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            )
            async for chunk in stream:
                chunks += bool(chunk.choices and chunk.choices[0].text)
                usage = chunk.usage or usage
            assert usage is not None
            details = usage.prompt_tokens_details
            return chunks, usage.completion_tokens, (details.cached_tokens or 0) if details else 0

        began, began_cpu = time.perf_counter(), time.process_time()
        told = await asyncio.gather(*map(one, prompts))
        ended, ended_cpu = time.perf_counter(), time.process_time()
    chunks, completed, cached = (sum(column) for column in zip(*told, strict=True))
    return {
        "seconds": ended - began,
        "cpu_s": ended_cpu - began_cpu,
        "chunks": chunks,
        "tokens": completed,
        "cached_tokens": cached,
    }


def main() -> None:
    url, streams = sys.argv[1], Streams(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        if "--openai" in sys.argv:
            answer = asyncio.run(_ask_openai(url, asked["prompts"], asked["tokens"]))
        else:
            answer = streams.ask(asked["prompts"], asked["tokens"])
        _write(sys.stdout, answer)


if __name__ == "__main__":
    main()
