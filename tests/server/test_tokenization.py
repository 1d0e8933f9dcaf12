"""/tokenize and /detokenize, in the shapes of vLLM and of SGLang."""

from __future__ import annotations

import json
from typing import Any

import pytest

import rootstock
from rootstock.server.formats.openai import tokenization
from rootstock.server.formats.openai.tokenization import Detokenized, Tokenized
from rootstock.testing.byte_tokenizer import PADDED_LOGITS
from rootstock.text.special_tokens import MARK
from server.conftest import assert_error, served_by_oracle, user

LIMIT = 4096  # tokens of the served model's context
TEXTS = ("", "Hello.", "ä ☃ 🙂", "a <|end|> b", f"{MARK}999999{MARK} {MARK}-{MARK}", "x" * 3000)


def tokenized(served: Any, **fields: Any) -> dict[str, Any]:
    answer = served.client.post("/tokenize", json=fields)
    assert answer.status_code == 200, answer.text
    Tokenized.model_validate(answer.json())
    return dict(answer.json())


@pytest.mark.parametrize("special", [None, True, False])
def test_a_prompts_tokens_are_those_of_a_completion(served: Any, special: bool | None) -> None:
    for text in TEXTS:
        told = tokenized(served, prompt=text, add_special_tokens=special, return_token_strs=True)
        assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
        assert told["max_model_len"] == LIMIT
        if special is not False and text:
            usage = served.complete(text, max_tokens=1).json()["usage"]
            assert usage["prompt_tokens"] == told["count"]
            assert usage == served.complete(told["tokens"], max_tokens=1).json()["usage"] | {
                "prompt_tokens_details": usage["prompt_tokens_details"]
            }
        back = served.client.post("/detokenize", json={"tokens": told["tokens"]}).json()
        Detokenized.model_validate(back)
        assert back["prompt"] == text
        assert back["text"] == served.assembly.tokenizer.decode(told["tokens"])


def test_several_prompts_have_lists(served: Any) -> None:
    single = [tokenized(served, prompt=text, return_token_strs=True) for text in TEXTS]
    several = tokenized(served, prompt=list(TEXTS), return_token_strs=True)
    for name in ("tokens", "count", "token_strs"):
        assert several[name] == [one[name] for one in single]
    assert tokenized(served, prompt="a")["token_strs"] is None
    asked = {"tokens": several["tokens"], "skip_special_tokens": False}
    back = served.client.post("/v1/detokenize", json=asked).json()
    assert back == {"prompt": list(TEXTS), "text": list(TEXTS)}


def test_a_chats_tokens_are_those_of_its_prompt(served: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    for fields in ({}, {"tools": tools}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        told = tokenized(served, messages=user("Hello."), **fields)
        usage = served.chat("Hello.", max_tokens=1, **fields).json()["usage"]
        assert told["count"] == usage["prompt_tokens"]
    assert tokenized(served, messages=user("Hello."))["tokens"] == served.chat_prompt("Hello.")
    assert served.client.post("/v1/tokenize", json={"messages": user("Hello.")}).is_success


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "a", "messages": user("a")}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt[1]"),
        ("/tokenize", {"prompt": [[1]]}, "prompt[0]"),
        ("/tokenize", {"prompt": ["a"] * 3000}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x" * 100 * LIMIT}, "prompt"),
        ("/tokenize", {"prompt": ["x" * LIMIT] * 1000}, "prompt"),
        ("/tokenize", {"messages": user("a"), "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": user("a"), "add_generation_prompt": True, "continue_final_message": True},
         "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [PADDED_LOGITS]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [[]] * 3000}, "tokens"),
        ("/detokenize", {"tokens": [1] * (tokenization.MAX_DETOKENIZED + 1)}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_wrong_bodies_are_refused_with_the_place(served: Any, path: str, fields: Any, param: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.client.post(path, content=json.dumps(fields), headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_empty_lists_have_no_text(served: Any) -> None:
    assert served.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": "", "text": ""}
    assert tokenized(served, prompt=[])["tokens"] == []


def test_a_server_with_a_key_asks_for_it() -> None:
    from rootstock.config import ServerConfig

    with served_by_oracle(server=ServerConfig(api_key="k", aliases=())) as served:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert_error(served.client.post(path, json=body), 401, "invalid_api_key")
            assert served.client.post(path, json=body, headers={"x-api-key": "k"}).is_success
        assert_error(served.client.get("/version"), 401, "invalid_api_key")
        version = served.client.get("/version", headers={"x-api-key": "k"}).json()
        assert version == {"version": rootstock.__version__}
        assert served.client.get("/ping").json() == {"status": "ok"}
