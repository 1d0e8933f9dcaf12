"""Prompts of requests, as a router sees them: the body of a request becomes token ids, without the model's weights.

The router knows neither the path of a request nor its head, except for Authorization. It guesses the API by the
fields of the body: a wrong guess costs a worse choice of the replica, and no more.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.resumable_blocks import BlockKeys, prefix_keys
from rootstock.cache.types import Tokens
from rootstock.config import Configuration
from rootstock.errors import ModelFileInvalid, RequestError, Unauthorized
from rootstock.pipeline.model import PromptModel
from rootstock.runtime.model_config import context_limit
from rootstock.runtime.select import import_transformers_alone
from rootstock.server.access.guard import Keys
from rootstock.server.answers.prompt_bodies import PromptReader, Prompts
from rootstock.server.formats.anthropic.routes import anthropic_prompts
from rootstock.server.formats.openai.routes import openai_prompts
from rootstock.server.formats.responses.routes import responses_prompts
from rootstock.server.formats.responses.store import ResponseStore
from rootstock.server.models.registry import chat_rules, public_heads_of
from rootstock.server.wire.sender import Sender
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.text.prompts.tenant_salt import is_chosen_by_client
from rootstock.text.tokenizer import HFTokenizer, ModelTokenizer

log = logging.getLogger(__name__)

_PREFIX_DIGITS = 8
_BLOCKS_OF_MESSAGES = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "document"})


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """The facts about a replica that its prompts' keys depend on."""

    weights: str
    kv_dtype: str
    rope_regime: str
    block_size: int
    adapters: tuple[tuple[str, str], ...]  # names and fingerprints

    @classmethod
    def of(cls, namespace: Namespace, block_size: int, adapters: Mapping[str, str]) -> ReplicaFacts:
        """Returns the facts about an engine with a namespace without a salt."""
        named = tuple(sorted(adapters.items()))
        return cls(namespace.weights, namespace.kv_dtype, namespace.rope_regime, block_size, named)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ReplicaFacts:
        return cls(**{**fields, "adapters": tuple((name, mark) for name, mark in fields["adapters"])})

    def namespace(self, salt: str, model: str) -> Namespace:
        """Returns the namespace of requests to a model or an adapter."""
        return Namespace(
            self.weights, self.kv_dtype, self.rope_regime, dict(self.adapters).get(model, ""), salt
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPrompt:
    """The prompt of a request that is to be routed."""

    tokens: Tokens
    salt: str = ""
    model: str = ""  # as the client named it
    public_tokens: int = 0
    stored_by: str = ""  # with which the ids of responses begin at the replica that has stored the beginning
    known_keys: dict[ReplicaFacts, BlockKeys] = field(default_factory=dict, repr=False)

    def keys(self, facts: ReplicaFacts) -> BlockKeys:
        """Returns the keys of its blocks at a replica. Slow for a long prompt; the second time is not."""
        if (found := self.known_keys.get(facts)) is not None:
            return found
        scope = Scope(facts.namespace(self.salt, self.model), self.public_tokens)
        found = self.known_keys[facts] = prefix_keys(self.tokens, scope, facts.block_size)
        return found


NO_TOKENS = np.empty(0, np.int32)
UNKNOWN = RoutedPrompt(NO_TOKENS)  # of a body that makes no prompt


class PromptRouter:
    """The prompts of one model's requests. Any thread may call `prompt`."""

    def __init__(self, config: Configuration, tokenizer: ModelTokenizer, context_limit: int) -> None:
        """`context_limit`: tokens of a prompt; replicas refuse longer ones. Raises InvalidOption."""
        model, server = config.model, config.server
        self._most_tokens = min(context_limit, config.engine.context_limit or context_limit)
        prompts = PromptTokenizer(tokenizer, self._most_tokens, config.engine.answer_memory_bytes)
        name = model.served_name or model.model
        self._model = PromptModel(name=name, tokenizer=prompts, rules=chat_rules(server))
        store = ResponseStore.open(None, server.responses_budget_bytes)  # empty: replicas store responses
        readers: dict[str, PromptReader[Any]] = {
            **openai_prompts(),
            **anthropic_prompts(),
            **responses_prompts(server, store),
        }
        self._prompts = Prompts(readers)
        self._keys = Keys(server)
        self._public = public_heads_of(server, prompts)

    @classmethod
    def load(cls, config: Configuration) -> PromptRouter:
        """Loads the tokenizer, without torch if this process has not imported it. Raises StartupError."""
        model, server = config.model, config.server
        import_transformers_alone()
        directory = Path(model.model).expanduser()
        place = str(directory) if directory.is_dir() else model.model
        tokenizer = HFTokenizer.load(place, server.chat_template, trust_remote_code=model.trust_remote_code)
        from transformers import PretrainedConfig

        try:
            limit, _ = context_limit(PretrainedConfig.get_config_dict(place)[0])
        except (OSError, ValueError) as error:
            raise ModelFileInvalid(place, "config.json", str(error)) from error
        return cls(config, tokenizer, limit)

    def prompt(self, body: bytes, authorization: str) -> RoutedPrompt:
        """Renders and tokenizes: not for an event loop. A body that makes no prompt is UNKNOWN: its replica
        answers with the error."""
        try:
            tenant = self._tenant(authorization)
            if tenant is None:
                return UNKNOWN
            sent = json.loads(body)
            if not isinstance(sent, dict):
                return UNKNOWN
            if stored_by := prefix_of(sent.get("previous_response_id")):
                return RoutedPrompt(NO_TOKENS, stored_by=stored_by)
            read = self._prompts.read(api_of(sent), sent)
            made = read.prepare(self._model, Sender(tenant))
        except (RequestError, ValueError, RecursionError):
            return UNKNOWN
        except Exception:
            log.exception("A request is routed without its prompt.")
            return UNKNOWN
        if len(made.tokens) > self._most_tokens:
            return UNKNOWN
        public = 0
        if self._public is not None and not is_chosen_by_client(made.salt):
            public = self._public.longest(made.tokens)
        return RoutedPrompt(made.tokens, made.salt, read.model or "", public)

    def _tenant(self, authorization: str) -> str | None:
        """Returns the tenant of a key; None: the key is wrong, and no work is done.

        A key in another header is not seen here: its prompts meet by their first block."""
        if not self._keys.are_needed or not authorization:
            return ""
        if not self._keys.is_current:
            self._keys.reload()
        caller = self._keys.caller({b"authorization": authorization.encode("latin-1", "replace")})
        return None if isinstance(caller, Unauthorized) else caller.tenant


def response_prefix(name: str) -> str:
    """Returns the digits with which a replica's ids of responses begin."""
    return xxhash.xxh3_64(name.encode()).hexdigest()[:_PREFIX_DIGITS]


def prefix_of(response_id: Any) -> str:
    """Returns the first digits of a response's id; "": it is no id."""
    if isinstance(response_id, str) and re.fullmatch(r"resp_[0-9a-f]{32}", response_id):
        return response_id[5 : 5 + _PREFIX_DIGITS]
    return ""


def api_of(body: Mapping[str, Any]) -> str:
    """Returns the name of the API that a body is for, as its fields say."""
    if "messages" not in body:
        return "completions" if "prompt" in body else "responses"
    if "system" in body or "thinking" in body:
        return "messages"
    tools, messages = body.get("tools"), body["messages"]
    if isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return "messages"
    if not isinstance(messages, list):
        return "chat"
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    is_of_messages = any(
        isinstance(block, dict) and block.get("type") in _BLOCKS_OF_MESSAGES for block in blocks
    )
    return "messages" if is_of_messages else "chat"
