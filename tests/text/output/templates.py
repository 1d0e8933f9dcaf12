"""A tokenizer with a chat template of its own, and small templates of the shapes that models' templates have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from rootstock.errors import ChatTemplateFailed
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.chat_template import TemplateNames, names_in
from rootstock.text.tokenizer import Message, Tool


class TemplateTokenizer(ByteTokenizer):
    """A byte tokenizer whose conversations a Jinja template renders."""

    def __init__(self, template: str) -> None:
        self.source = template
        self._template = _compile_jinja_template(template)
        self._names = names_in(template)

    @property
    def template_names(self) -> TemplateNames:
        return self._names

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        try:
            rendered: str = self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                bos_token="<s>",
                eos_token="</s>",
                **({"add_generation_prompt": True} | options),
            )
        except (TemplateError, TypeError) as error:
            raise ChatTemplateFailed(str(error)) from error
        return rendered
