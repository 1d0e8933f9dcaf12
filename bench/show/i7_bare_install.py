"""I7: Rootstock without torch, as a Mac installs it: its size, and the answers of a server on MLX.

A fresh virtual environment in a temporary directory gets exactly the requirements that pyproject.toml gives a Mac
with Apple's chips for `rootstock[mlx]`, in the versions of constraints.txt, and Rootstock itself, built from a copy
of this checkout. On Linux, `mlx` is replaced by `mlx[cpu]`, the build of MLX that computes there. Nothing else
differs, and the environment sees no packages of this one.

In that environment, mlx-lm converts a small generated model, in float32 and to 4 bits, and `rootstock serve
--runtime mlx` serves each. The openai client asks for chats, streams and completions, cold and warm, and every
greedy answer is compared with that of mlx-lm's own `stream_generate` in the same environment.

Sizes are the files of installed distributions, without compiled bytecode: of Rootstock, and of everything that it
requires, directly and indirectly. The torch side is this environment's, by the requirements of a Linux machine
without extras, with the build of torch that is installed here. `torch_version` names it: "+cpu" is the build for
CPUs, and the one that PyPI has for Linux is gigabytes larger. Neither side counts pip. On a Mac, MLX's own files
are others than on Linux, so that the size differs by theirs.

Needs a package index. It takes minutes, most of them downloads, and about 1 GB of disk in the temporary directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, at_least, at_most, conclude, could_not, exactly
from openai import OpenAI
from packaging.requirements import Requirement

SHOW = "I7"
MAC = {"sys_platform": "darwin", "platform_machine": "arm64", "platform_system": "Darwin", "extra": ""}
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux", "extra": ""}
OF_TORCH = ("torch", "numba", "llvmlite", "triton")
ANSWER_TOKENS = 24
WAIT_S = 600

CHATS = [
    [{"role": "user", "content": "Tell me about the garden."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is on the desk?"}],
    [
        {"role": "user", "content": "Begin a story."},
        {"role": "assistant", "content": "The day was long."},
        {"role": "user", "content": "Go on."},
    ],
]
PROMPTS = ["The doctor", "A dollar for the", "In the depth of the desert"]

# The following programs run in the new environment.

PRESENT = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]))
"""

MAKE_MODELS = """
import sys
from pathlib import Path
from mlx_lm import convert
from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model
folder = Path(sys.argv[1])
spec = TinyModelSpec(hidden_size=128, intermediate_size=256, layers=4, corpus_lines=800, context_limit=4096)
made = str(ensure_tiny_model(spec, folder))
convert(made, mlx_path=str(folder / "float32"), dtype="float32")
convert(made, mlx_path=str(folder / "4bit"), quantize=True, q_bits=4, q_group_size=64, dtype="float32")
"""

ANSWERS = """
import json, sys
from mlx_lm import load, stream_generate
model, tokenizer = load(sys.argv[1])
asked = json.loads(sys.argv[2])
prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in asked["chats"]]
prompts += [tokenizer.encode(prompt) for prompt in asked["prompts"]]
texts = []
for prompt in prompts:
    found = stream_generate(model, tokenizer, prompt, max_tokens=asked["tokens"])
    ids = [each.token for each in found if each.token not in tokenizer.eos_token_ids]
    texts.append(tokenizer.decode(ids, skip_special_tokens=True))
print(json.dumps(texts))
"""

# Prints name and bytes of each distribution that the given requirements need in this environment.
SIZES = """
import json, sys
from importlib.metadata import distribution
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
sizes, left = {}, [Requirement(text) for text in json.loads(sys.argv[1])]
seen = set()
while left:
    wanted = left.pop()
    for extra in ("", *sorted(wanted.extras)):
        name = canonicalize_name(wanted.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found = distribution(name)
        files = [file for file in found.files or () if "__pycache__" not in str(file)]
        sizes[name] = sum(path.stat().st_size for file in files if (path := file.locate()).is_file())
        needed = [Requirement(text) for text in found.requires or ()]
        left += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
print(json.dumps(sizes))
"""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--keep", type=Path, help="directory for the environment, which then stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rootstock-i7-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        show(folder.resolve())


def show(folder: Path) -> None:
    requirements = requirements_of(MAC, "mlx")
    if sys.platform != "darwin":
        requirements = [re.sub(r"^mlx(?=[<>=])", "mlx[cpu]", text) for text in requirements]
    say(f"installing {len(requirements)} requirements and Rootstock, without torch")
    python = install(folder, requirements)
    absent = not json.loads(run(python, "-c", PRESENT, *OF_TORCH))
    sizes = json.loads(run(python, "-c", SIZES, json.dumps(requirements)))
    of_torch = json.loads(run(Path(sys.executable), "-c", SIZES, json.dumps(requirements_of(LINUX))))
    rootstock = sum(
        file.stat().st_size for file in (ROOT / "src").rglob("*") if "__pycache__" not in file.parts
    )
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    run(python, "-c", MAKE_MODELS, models)

    figures: dict[str, Any] = {
        "torch_absent": absent,
        "requirements": len(requirements),
        "distributions": len(sizes),
        "mib": mib(sum(sizes.values()) + rootstock),
        "torch_side_distributions": len(of_torch),
        "torch_side_mib": mib(sum(of_torch.values()) + rootstock),
        "torch_version": version_of("torch"),
        "largest_mib": largest(sizes),
        "torch_side_largest_mib": largest(of_torch),
        "doctor": runtime_of(python),
    }
    figures["size_ratio"] = round(figures["mib"] / figures["torch_side_mib"], 3)
    asked, equal, cached = 0, 0, 0
    for name in ("float32", "4bit"):
        expected = json.loads(
            run(
                python,
                "-c",
                ANSWERS,
                models / name,
                json.dumps({"chats": CHATS, "prompts": PROMPTS, "tokens": ANSWER_TOKENS}),
            )
        )
        with server(python, folder, models / name) as (url, ready):
            say(ready)
            figures[f"ready_{name}"] = re.sub(r"http\S+", "URL", ready)
            for text, want, found_tokens in answers(url, expected):
                asked += 1
                equal += text == want
                cached += found_tokens
                if text != want:
                    say(f"{name}: {text!r} instead of mlx-lm's {want!r}")
    figures |= {"answers": asked, "answers_equal_to_mlx_lm": equal, "cached_tokens": cached}
    conclude(
        SHOW,
        figures,
        {
            "torch_absent": exactly(True),
            "answers": exactly(2 * (3 * len(CHATS) + 2 * len(PROMPTS))),
            "answers_equal_to_mlx_lm": exactly(asked),
            "cached_tokens": at_least(1),
            "size_ratio": at_most(0.5),
        },
    )


def requirements_of(system: dict[str, str], *extras: str) -> list[str]:
    """Returns the requirements of pyproject.toml on a system, without the markers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [
        *project["dependencies"],
        *(t for extra in extras for t in project["optional-dependencies"][extra]),
    ]
    found = [each for each in map(Requirement, texts) if each.marker is None or each.marker.evaluate(system)]
    for each in found:
        each.marker = None
    return sorted({str(each) for each in found})


def install(folder: Path, requirements: Sequence[str]) -> Path:
    """Makes the environment, and returns its Python."""
    run(Path(sys.executable), "-m", "venv", "--clear", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
    run(python, *pip, "-c", ROOT / "constraints.txt", *requirements)
    source = folder / "source"  # a build writes beside its source
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(python, *pip, "--no-deps", source)
    return python


def run(python: Path, *arguments: object) -> str:
    """Runs a program of an environment, outside of this checkout, and returns its last line."""
    done = subprocess.run(
        [str(python), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        env=environment(),
        timeout=WAIT_S,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        could_not(SHOW, f"{' '.join(map(str, arguments[:4]))[:80]}: exit status {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def environment() -> dict[str, str]:
    """Returns this process's environment without paths of this checkout and options of Rootstock."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "ROOTSTOCK_", "VIRTUAL_ENV"))
    }
    kept["HF_HUB_OFFLINE"] = "1"
    if (
        sys.platform != "darwin"
    ):  # on a CPU, MLX compiles each fused function with a C++ compiler, which takes minutes
        kept["MLX_DISABLE_COMPILE"] = "1"
    return kept


@contextmanager
def server(python: Path, folder: Path, model: Path) -> Iterator[tuple[str, str]]:
    """Serves a model, and yields the URL and the line that tells that the server is ready."""
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [
                *(str(python.parent / "rootstock"), "serve", str(model), "--runtime", "mlx"),
                *("--dtype", "float32", "--port", "0", "--kv-budget", "32MiB"),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=tempfile.gettempdir(),
            env=environment(),
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            found = re.search(r"http://[\d.]+:\d+", ready)
            if found is None:
                could_not(SHOW, f"the server does not start: {log.read_text()[-2000:]}")
            yield found[0], ready
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)


def answers(url: str, expected: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Asks the server everything, by the openai client.

    Yields each answer, the one of mlx-lm, and the number of cached prompt tokens.
    """
    greedy: dict[str, Any] = {"model": "m", "temperature": 0.0, "max_tokens": ANSWER_TOKENS}
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S) as client:
        for chat, want in zip(CHATS, expected, strict=False):
            for _ in ("cold", "warm"):
                whole = client.chat.completions.create(messages=chat, **greedy)  # type: ignore[arg-type]
                details = whole.usage and whole.usage.prompt_tokens_details
                yield whole.choices[0].message.content or "", want, (details and details.cached_tokens) or 0
            pieces = client.chat.completions.create(messages=chat, stream=True, **greedy)  # type: ignore[arg-type]
            yield "".join(each.choices[0].delta.content or "" for each in pieces if each.choices), want, 0
        for prompt, want in zip(PROMPTS, expected[len(CHATS) :], strict=True):
            yield client.completions.create(prompt=prompt, **greedy).choices[0].text, want, 0
            texts = client.completions.create(prompt=prompt, stream=True, **greedy)
            yield "".join(each.choices[0].text for each in texts if each.choices), want, 0


def runtime_of(python: Path) -> str:
    """Returns the line of `rootstock doctor` that tells the runtime."""
    found = json.loads(run(python, "-m", "rootstock", "doctor", "--json"))
    return next(f"{each['name']}  {each['value']}" for each in found if each["name"].startswith("runtime"))


def version_of(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def largest(sizes: dict[str, int]) -> dict[str, float]:
    by_size = sorted(sizes.items(), key=lambda item: -item[1])
    return {name: mib(size) for name, size in by_size[:8]}


def mib(size: int) -> float:
    return round(size / 2**20, 1)


def say(text: str) -> None:
    print(f"{SHOW}: {text}", flush=True)


if __name__ == "__main__":
    main()
