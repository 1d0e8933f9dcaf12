"""Byte tokenizer for tests with the fake runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.errors import ChatTemplateFailed
from rootstock.text.chat_template import TemplateNames
from rootstock.text.special_tokens import EscapedNames
from rootstock.text.tokenizer import KeptTokens, Message, PlacedTokens, Tool, no_position, single_part


class ByteTokenizer:
    """Tokenizer with a token for each byte and a few special tokens for a chat."""

    SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    END = 256 + SPECIAL.index("<|end|>")
    vocab_size = 256 + len(SPECIAL)
    longest_token_chars = max(map(len, SPECIAL))
    _NAMES = EscapedNames(SPECIAL)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (self.END,)

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_chat(self, rendered: str) -> Tokens:
        parts = re.split("(" + "|".join(map(re.escape, self.SPECIAL)) + ")", rendered)
        special = {name: np.array([256 + index], dtype=np.int32) for index, name in enumerate(self.SPECIAL)}
        return np.concatenate(
            [special[part] if part in special else self.encode(self._NAMES.unescape(part)) for part in parts]
        )

    def escape(self, text: str, kept: KeptTokens) -> str:
        return self._NAMES.escape(text, self._NAMES.names if kept is KeptTokens.ALL else ())

    def escaped_positions(self, escaped: str, chars: Sequence[int]) -> list[int]:
        return self._NAMES.positions(escaped, chars)

    def pieces(self, rendered: str) -> list[str]:
        return [
            piece
            for piece in re.split("(?=" + "|".join(map(re.escape, self.SPECIAL)) + ")", rendered)
            if piece
        ]

    def place_chat(self, rendered: str) -> PlacedTokens:
        tokens = self.encode_chat(rendered)
        return PlacedTokens(rendered, tokens, no_position, no_position, single_part, self.encode_chat)

    @property
    def template_names(self) -> TemplateNames:
        return TemplateNames(frozenset({"add_generation_prompt"}))

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        lines = ["<|begin|>"]
        if tools:
            lines.append(f"<|system|>{json.dumps([dict(tool) for tool in tools])}<|end|>")
        for message in messages:
            if f"<|{message['role']}|>" not in self.SPECIAL:
                raise ChatTemplateFailed(f"there is no role {message['role']!r}")
            lines.append(f"<|{message['role']}|>{message.get('content') or ''}<|end|>")
        if options.get("add_generation_prompt", True):
            lines.append("<|assistant|>")
        return "".join(lines)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")

    def is_hidden(self, token: int) -> bool:
        return token >= 256

    def is_added(self, token: int) -> bool:
        return 256 <= token < self.vocab_size

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return self.SPECIAL[token - 256].encode() if token < self.vocab_size else b""


# Of a model with this tokenizer: more than there are tokens, as most models have.
PADDED_LOGITS = ByteTokenizer.vocab_size + 41
