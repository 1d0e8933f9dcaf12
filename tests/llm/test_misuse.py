"""Calls of the library that cannot work, or would not end: each says so in the library's own words."""

from __future__ import annotations

import ast
import asyncio
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rootstock
from llm.conftest import Oracle
from rootstock import SamplingParams
from rootstock.errors import BudgetTooSmall, InvalidOption, LLMForked, ModelFileInvalid, PromptTooLong
from rootstock.llm.llm import LLM
from rootstock.llm.options import Options, configuration
from rootstock.llm.params import DEFAULT_MAX_TOKENS
from rootstock.option_table import in_library_words, keyword_of
from waiting import HANG_S

SOURCE = Path(rootstock.__file__).parent
HELLO = [{"role": "user", "content": "Hello"}]

# ---- answers without a limit

CALLS: dict[str, Callable[[LLM, SamplingParams | None], Any]] = {
    "generate": lambda llm, params: llm.generate("Hello", params),
    "chat": lambda llm, params: llm.chat(HELLO, params),
    "agenerate": lambda llm, params: asyncio.run(llm.agenerate("Hello", params)),
    "achat": lambda llm, params: asyncio.run(llm.achat(HELLO, params)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_answer_without_max_tokens_ends_with_a_warning(oracle: Callable[..., Oracle], call: str) -> None:
    llm = oracle().llm
    params = SamplingParams(temperature=0, ignore_eos=True)
    with pytest.warns(UserWarning, match="cut at 1,024 tokens .* SamplingParams has no max_tokens"):
        [answer] = CALLS[call](llm, params)
    assert answer.finish_reason == "length"
    assert answer.completion_tokens == DEFAULT_MAX_TOKENS < llm.context_limit


async def _streamed(llm: LLM, params: SamplingParams) -> list[str | None]:
    return [delta.finish_reason async for delta in llm.achat_stream(HELLO, params)]


STREAMS: dict[str, Callable[[LLM, SamplingParams], list[str | None]]] = {
    "stream": lambda llm, params: [delta.finish_reason for delta in llm.chat_stream(HELLO, params)],
    "astream": lambda llm, params: asyncio.run(_streamed(llm, params)),
}


@pytest.mark.parametrize("call", STREAMS)
def test_a_stream_without_max_tokens_ends_with_a_warning(oracle: Callable[..., Oracle], call: str) -> None:
    llm = oracle().llm
    with pytest.warns(UserWarning, match="SamplingParams has no max_tokens") as told:
        reasons = STREAMS[call](llm, SamplingParams(temperature=0, ignore_eos=True))
    assert reasons[-1] == "length"
    assert [Path(each.filename).name for each in told] == [Path(__file__).name] or call == "astream"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            STREAMS[call](llm, SamplingParams(temperature=0, ignore_eos=True, max_tokens=3))[-1] == "length"
        )


def test_an_answer_with_max_tokens_is_cut_without_a_warning(oracle: Callable[..., Oracle]) -> None:
    llm = oracle().llm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for limit in (1, 1100):
            [answer] = llm.generate("Hello", SamplingParams(temperature=0, ignore_eos=True, max_tokens=limit))
            assert answer.completion_tokens == limit
        assert SamplingParams(min_tokens=2000).stopping().max_tokens == 2000


# ---- a fork


def _asks_in_fork(llm: LLM, pipe: Any) -> None:
    found = []
    for ask in (
        lambda: llm.generate("Hello"),
        lambda: llm.chat(HELLO),
        lambda: llm.stream("Hello"),
        lambda: llm.explain("Hello"),
        lambda: llm.stats(),
        lambda: llm.clear_cache(),
        lambda: llm.load_adapter("a", "b"),
        lambda: asyncio.run(llm.agenerate("Hello")),
    ):
        try:
            ask()
        except Exception as error:
            found.append(type(error).__name__)
    llm.close()
    pipe.send(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_says_that_it_has_no_engine(oracle: Callable[..., Oracle]) -> None:
    llm = oracle().llm
    llm.generate("Hello", SamplingParams(max_tokens=1))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_asks_in_fork, args=(llm, theirs))
    child.start()
    try:
        assert ours.poll(HANG_S), "the fork hangs"
        assert ours.recv() == [LLMForked.__name__] * 8
        child.join(HANG_S)
        assert child.exitcode == 0
    finally:
        child.kill()
    [answer] = llm.generate("Hello", SamplingParams(max_tokens=1, ignore_eos=True))
    assert answer.completion_tokens == 1


# ---- names of options


PARAMETERS = {*Options.__annotations__, "chat_template", "parse_special_tokens", "sampling_defaults"}
# Options of other commands, in messages that no user of the library meets. A new option is in neither set.
OF_SERVERS = {
    "admin_key", "alias", "allowed_hosts", "allowed_origins", "api_key", "api_keys", "drop_volatile",
    "explain", "host", "idle_work", "max_body", "max_connections", "metrics_tenants", "port",
    "public_prompts", "responses_budget", "responses_file", "sse_keep_alive", "drain_timeout", "tool_parser",
    "traces", "warm", "log_format", "log_level", "adapter_directory", "show_prompts", "models",
    "media", "kv_events",
}  # fmt: skip


def options_in(path: Path) -> Iterator[str]:
    """Yields the options of the command line that strings of a file name, docstrings left out."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            for negated, name in re.findall(r"(?<![\w-])--(no-)?([a-z][a-z-]*[a-z])", node.value):
                yield f"--{negated}{name}"


MENTIONED = sorted(
    {
        option
        for folder in ("errors", "runtime", "engine", "cache", "tiers", "config.py")
        for path in ([SOURCE / folder] if folder.endswith(".py") else (SOURCE / folder).rglob("*.py"))
        for option in options_in(path)
    }
)


@pytest.mark.parametrize("option", MENTIONED)
def test_an_option_in_a_message_is_a_parameter_of_the_library(option: str) -> None:
    name = keyword_of(option.replace("--no-", "--"))
    assert name in PARAMETERS | OF_SERVERS
    if name in PARAMETERS:
        error = InvalidOption("--kv-budget", 1, f"less, or serve with {option} or {option}.")
        shown = in_library_words(error).message
        assert "--" not in shown
        assert shown.count(f"{name}=False" if option.startswith("--no-") else name) >= 2


def test_other_text_stays_as_it_is() -> None:
    text = "a--b, -- and ---x, --X"
    assert in_library_words(InvalidOption("x", 1, text)).allowed == text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"budget_bytes": -1}, "budget_bytes is -1"),
        ({"budget_bytes": "many"}, "budget_bytes is 'many'"),
        ({"kv_cache_memory_bytes": "many"}, "kv_cache_memory_bytes is 'many'"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_batch": 1, "max_num_seqs": 2}, "left out where max_batch is given"),
        ({"max_modle_len": 5}, "did you mean max_model_len"),
        ({"kv_budget": "1GiB"}, "did you mean budget_bytes"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"disk_write": "never"}, "disk_write is 'never'"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"draft_tokens": -5}, "draft_tokens is -5"),
        ({"verify_hits": 5}, "verify_hits is 5"),
        ({"disk_dir": 5}, "disk_dir is 5, but must be text or a Path or None"),
        ({"adapters": ["a"]}, "adapters is ['a'], but must be a mapping"),
        ({"adapters": {"a": 1}}, "adapters is {'a': 1}, but must be a mapping"),
    ],
)
def test_wrong_options_are_named_as_they_were_given(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        configuration("m", given)
    assert named in refused.value.message
    assert "--" not in refused.value.message


WRONG: tuple[Any, ...] = (b"1", [], {}, object(), float("nan"), float("inf"), 1.5, True, "x", None)


@pytest.mark.parametrize("name", Options.__annotations__)
def test_options_of_a_wrong_type_are_named(name: str) -> None:
    refused = []
    for value in WRONG:
        try:
            configuration("m", {name: value})
        except InvalidOption as error:
            refused.append(error.message)
    assert len(refused) >= 6, "at most text, a flag, a number and None are an option's value"
    assert all(message.startswith(f"{name} is ") for message in refused)


def test_a_password_in_a_wrong_option_is_not_shown() -> None:
    with pytest.raises(InvalidOption, match="did you mean remote") as refused:
        configuration("m", {"remote_url": "valkey://:secret@host"})
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("model", [None, 5, b"m", ["m"]])
def test_a_model_of_a_wrong_type_is_named(model: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^model is "):
        LLM(model)


def test_numbers_of_numpy_are_numbers() -> None:
    made = configuration(
        "m", {"max_batch": np.int64(3), "retained_share": np.float32(0.5), "itl_target_s": 1}
    )
    assert type(made.engine.max_batch) is int
    assert made.cache.retained_share == 0.5


def test_errors_of_a_load_and_of_a_call_name_parameters(
    small_model: Path, tmp_path: Path, oracle: Callable[..., Oracle]
) -> None:
    with pytest.raises(BudgetTooSmall, match=r"^budget_bytes is .* Raise budget_bytes or lower block_size"):
        LLM(small_model, budget_bytes=100)
    with pytest.raises(InvalidOption, match=r"^context_limit is "):
        LLM(str(small_model), context_limit=10**9)
    with pytest.raises(PromptTooLong, match="serve with a larger budget_bytes or context_limit"):
        oracle().llm.generate([1] * 5000)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in small_model.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "generation_config.json").unlink(missing_ok=True)
    (copy / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFileInvalid, match="sampling_defaults openai"):
        LLM(str(copy))
    with pytest.raises(InvalidOption, match=r"^sampling_defaults is 'mine'"):
        LLM(str(copy), sampling_defaults="mine")
