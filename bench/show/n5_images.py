"""N5: images. Small models of text and images, one of each family, answer conversations with images.

    schedules  conversations whose images are shared, repeated, evicted and restored after restarts, and that diverge
               behind an image: every answer is compared with transformers' own `generate`, and a part of them with a
               runtime without a cache
    exact      the second turn of a conversation finds its first turn cached to the last computed token
    formats    a server answers the same picture and question alike in four formats, and finds it cached
    hostile    bombs, broken files, too many images and the like are refused with a reason, while others are answered

Mistral 3 and Llama 4 need torchvision: without it they are left out, and the number of families is missed.
`ROOTSTOCK_TORCHVISION` names a directory that has it.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  # puts the tests on the path
import torchvision_here  # isort: skip  # before transformers is imported

import base64
import io
import json
import struct
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import transformers
from common import argument_parser, at_least, conclude, exactly
from PIL import Image

from image_checkpoints import FAMILIES, file_of, picture, save_images
from image_schedules import ANSWER_TOKENS, FILES, Player, Turns, messages_of
from rootstock.bench.serving import ServerProcess
from rootstock.cache.families import FullAttention
from rootstock.cache.longest_match import common_prefix
from rootstock.cache.radix_node import NEAR_TOKENS
from rootstock.llm.params import SamplingParams

SHOW = "N5"
COLD = 40  # conversations of a family that a runtime without a cache answers, too
READY_WITHIN_S = 300.0
QUESTION = "What is this?"
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
Json = dict[str, Any]


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--schedules", type=int, default=50, help="of each family")
    options.add_argument("--families", default=",".join(FAMILIES), help="comma-separated")
    given = options.parse_args()
    assert torchvision_here is not None
    transformers.logging.set_verbosity_error()
    figures: Json = {"families": 0, "schedules": 0, "requests": 0, "restarts": 0, "wrong": 0}
    figures |= {"cold": 0, "wrong_cold": 0, "inexact": 0}
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families.split(","):
            began = time.perf_counter()
            player = Player(save_images(Path(folder) / family, family))
            for seed in range(given.schedules):
                player.play(seed, Path(folder) / f"disk-{family}-{seed}")
            tally = player.tally
            for line in tally.wrong[:3]:
                print(line)
            figures["families"] += 1
            figures["schedules"] += tally.schedules
            figures["requests"] += tally.requests
            figures["restarts"] += tally.restarts
            figures["wrong"] += len(tally.wrong)
            wrong_cold, inexact = cold_answers(player), inexact_turns(player)
            figures["cold"] += COLD
            figures["wrong_cold"] += wrong_cold
            figures["inexact"] += inexact
            share = tally.cached_tokens / tally.prompt_tokens
            print(
                f"{family}: {tally.schedules} schedules, {tally.requests} requests with {tally.images} images, "
                f"{share:.0%} of the tokens cached, {tally.restarts} restarts, {len(tally.wrong)} wrong, "
                f"{wrong_cold} wrong when cold, {inexact} inexact, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
        with ServerProcess(
            [str(Path(folder) / FAMILIES[0]), "--port", "0", "--kv-budget", "64MiB", "--dtype", "float32"],
            READY_WITHIN_S,
        ) as server:
            figures |= formats(server.url)
            figures |= hostile(server.url)
    bars = {
        "families": at_least(4),
        "schedules": at_least(200),
        "wrong": exactly(0),
        "wrong_cold": exactly(0),
        "inexact": exactly(0),
        "different_formats": exactly(0),
        "uncached_formats": exactly(0),
        "not_refused": exactly(0),
        "disturbed": exactly(0),
    }
    conclude(SHOW, figures, bars)


def cold_answers(player: Player) -> int:
    """Counts the answers of a runtime without a cache that differ from transformers'."""
    before = len(player.tally.wrong)
    with player.opened(enabled=False, budget_bytes="64MiB") as llm:
        for turns in player.asked[:COLD]:
            (output,) = llm.chat([messages_of(turns)], GREEDY)
            player.judge(turns, output, "cold")
    wrong = len(player.tally.wrong) - before
    del player.tally.wrong[before:]
    return wrong


def inexact_turns(player: Player) -> int:
    """Counts second turns whose cached tokens are not the first turn's computed ones."""
    inexact = 0
    with player.opened(budget_bytes="64MiB") as llm:
        resumes_anywhere = all(isinstance(each, FullAttention) for each in llm.description.families)
        for number in range(len(FILES)):
            first: Turns = (("user", (number, f"{QUESTION} {number}")),)
            (output,) = llm.chat([messages_of(first)], GREEDY)
            second = (
                *first,
                ("assistant", (output.text,)),
                ("user", ("And now?", (number + 1) % len(FILES))),
            )
            (later,) = llm.chat([messages_of(second)], GREEDY)
            cached = later.outputs[0].usage.cached_tokens
            # The last token of an answer is not computed, and a text need not give an answer's tokens back.
            computed = np.array([*output.prompt_token_ids, *output.token_ids[:-1]])
            exact = common_prefix(np.array(later.prompt_token_ids), computed)
            # A checkpoint so near is not left again: the positions of families that resume nowhere else.
            near = 0 if resumes_anywhere else NEAR_TOKENS
            if not exact - near <= cached <= exact:
                print(f"{cached} tokens cached of {exact} computed ones")
                inexact += 1
    return inexact


# ---- formats


def formats(url: str) -> Json:
    """Asks about a picture in four formats, twice each."""
    coded = base64.b64encode(file_of(picture(77))).decode()
    answers, uncached = [], 0
    for attempt in range(2):
        for ask in (chat, responses, messages, ollama):
            text, cached = ask(url, coded)
            answers.append(text)
            uncached += bool(attempt) and not cached
            print(f"{ask.__name__}: {text!r}, {cached} tokens cached")
    return {"different_formats": len(set(answers)) - 1, "uncached_formats": uncached}


def _post(url: str, path: str, body: Json) -> Json:
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def chat(url: str, coded: str) -> tuple[str, int]:
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    found = _post(url, "/v1/chat/completions", body)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached


def responses(url: str, coded: str) -> tuple[str, int]:
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{coded}"},
        {"type": "input_text", "text": QUESTION},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8, "temperature": 0}
    found = _post(url, "/v1/responses", body)
    text = "".join(part["text"] for item in found["output"] for part in item.get("content", []))
    return text, found["usage"]["input_tokens_details"]["cached_tokens"]


def messages(url: str, coded: str) -> tuple[str, int]:
    source = {"type": "base64", "media_type": "image/png", "data": coded}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    found = _post(url, "/v1/messages", {**body, "model": "any"})
    text = "".join(part.get("text", "") for part in found["content"])
    return text, found["usage"]["cache_read_input_tokens"]


def ollama(url: str, coded: str) -> tuple[str, int]:
    # Ollama's clients send images beside the text: they stand behind it. The prompt is another one.
    content = [
        {"type": "image_url", "image_url": f"data:image/png;base64,{coded}"},
        {"type": "text", "text": QUESTION},
    ]
    body = {"messages": [{"role": "user", "content": content}], "stream": False}
    found = _post(url, "/api/chat", {**body, "model": "any", "options": {"num_predict": 8, "temperature": 0}})
    return found["message"]["content"], found.get("prompt_eval_cached_count", 1)


# ---- hostile images


def bombs() -> dict[str, list[str]]:
    """Returns hostile requests by name: the sources of their images."""
    good = file_of(picture(5))
    gif = io.BytesIO()
    frames = [Image.new("P", (2_000, 2_000), number % 7) for number in range(60)]
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:])
    files = {
        "a bomb of 2.5 billion pixels": png(50_000, 50_000),
        "a bomb at the width's limit": png(2**31 - 1, 2**31 - 1),
        "a bomb of text": with_chunk(good, b"zTXt", b"a\0\0" + zlib.compress(b"a" * 2**28)),
        "a broken header": b"\x89PNG\r\n\x1a\n" + b"\xff" * 100,
        "half a file": good[: len(good) // 2],
        "noise": bytes(range(256)) * 40,
        "an SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "a TIFF": file_of(picture(5), "TIFF"),
        "a line of pixels": file_of(Image.new("RGB", (20_000, 1))),
        "a long line of pixels": file_of(Image.new("L", (1, 60_000))),
    }
    sources = {
        name: [f"data:image/png;base64,{base64.b64encode(data).decode()}"] for name, data in files.items()
    }
    tiny = f"data:image/png;base64,{base64.b64encode(file_of(Image.new('1', (16, 16)))).decode()}"
    return sources | {
        "10,000 images": [tiny] * 10_000,
        "4,000 images": [tiny] * 4_000,
        "101 images": [tiny] * 101,
        "a large file": ["data:image/png;base64," + "A" * (28 * 1024**2)],
        "an address": ["https://example.com/a.png"],
        "a file of this machine": ["file:///etc/passwd"],
        "an address in capitals": ["HTTP://127.0.0.1/a.png"],
        "no base64": ["data:image/png;base64,@@@@"],
        "no data": ["data:image/png;base64,"],
        "no image at all": ["data:,hello"],
        "an empty source": [""],
    }


def png(width: int, height: int) -> bytes:
    """Returns a PNG file that declares a size, with a few rows of pixels."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + 50_000 // 8) * 64)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def with_chunk(file: bytes, kind: bytes, data: bytes) -> bytes:
    """Inserts a chunk behind the header of a PNG file."""
    return file[:33] + chunk(kind, data) + file[33:]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def hostile(url: str) -> Json:
    """Sends hostile images while other clients ask about a good one."""
    coded = base64.b64encode(file_of(picture(78))).decode()
    expected, _ = chat(url, coded)
    disturbed, asked, over = [0], [0], threading.Event()

    def others() -> None:
        while not over.is_set():
            asked[0] += 1
            try:
                disturbed[0] += chat(url, coded)[0] != expected
            except Exception as error:
                print(f"another client was disturbed: {error!r}")
                disturbed[0] += 1

    client = threading.Thread(target=others)
    client.start()
    not_refused = 0
    for name, sources in bombs().items():
        content = [{"type": "image_url", "image_url": {"url": source}} for source in sources]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        began = time.perf_counter()
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        said = json.dumps(response.json())[:160]
        print(f"{name}: {response.status_code} in {time.perf_counter() - began:.1f} s, {said}", flush=True)
        not_refused += not 400 <= response.status_code < 500
    over.set()
    client.join()
    return {
        "hostile": len(bombs()),
        "not_refused": not_refused,
        "others": asked[0],
        "disturbed": disturbed[0],
    }


if __name__ == "__main__":
    main()
