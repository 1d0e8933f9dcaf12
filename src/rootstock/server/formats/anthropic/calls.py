"""Calls of Anthropic's messages: a body as a request to the engine, and the format of its response."""

from __future__ import annotations

import uuid

from rootstock.errors import PromptTextTooLong
from rootstock.pipeline.model import PromptModel, ServedModel
from rootstock.server.answers.prompt_bodies import PreparedPrompt
from rootstock.server.formats.anthropic.answers import MessageFormat, PromptUsage
from rootstock.server.formats.anthropic.block_events import AnswerStyle
from rootstock.server.formats.anthropic.edits import edited
from rootstock.server.formats.anthropic.schema import MessagesRequest, PromptFields
from rootstock.server.wire.api_call import ApiCall, Json, call_of, hints_of
from rootstock.server.wire.cache_diagnostics import anthropic_diagnose
from rootstock.server.wire.sender import Sender
from rootstock.text.constraints.asked import Constraint
from rootstock.text.constraints.json_schema import json_schema_of
from rootstock.text.conversation.types import Conversation
from rootstock.text.prompts.tenant_salt import PromptOwner


def messages_call(model: ServedModel, body: MessagesRequest, sender: Sender) -> ApiCall:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    body.refuse_unsupported()
    sampling = body.sampling(model.vocab_size, model.defaults, None)
    stop = body.stopping(body.max_tokens, model.vocab_size)
    owner = sender.owner(body.cache_salt)
    thought = body.thought()
    conversation, applied = _edited(model, body, owner)
    chat = model.prepared_chat(conversation, owner, _constraint(body), thought.budget_tokens)
    prompt_tokens = len(chat.prompt.tokens)
    hints = hints_of(body, sender.head, owner, chat.prompt.marks, chat.ignored)
    id = f"msg_{uuid.uuid4().hex}"
    asked = body.diagnostics
    diagnose = None if asked is None else anthropic_diagnose(model, chat, asked.previous_message_id)
    model.fingerprints.add(owner, id, chat.fingerprint)
    format = MessageFormat(
        id,
        # The name of the request: Claude Code drops the thinking of answers that name another model.
        body.model or model.name,
        chat.new_parser,
        PromptUsage(prompt_tokens, model.stored_tokens(prompt_tokens), hints),
        model.context_limit,
        AnswerStyle(thought.is_shown, conversation.tool_choice.parallel),
        applied,
        diagnose,
    )
    return call_of(
        model,
        format,
        chat.requests(id, 1, sampling, stop, diagnose=asked is not None, hints=hints.cache),
        stream=bool(body.stream),
        chat=chat,
    )


def counted_tokens(model: ServedModel, body: PromptFields, sender: Sender) -> Json:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    body.refuse_unsupported()
    owner = sender.owner(body.cache_salt)
    conversation, applied = _edited(model, body, owner)
    prompt_tokens = len(model.rendered_chat(conversation, owner).prompt.tokens)
    counted: Json = {"input_tokens": prompt_tokens}
    if applied is not None:
        cleared = sum(edit["cleared_input_tokens"] for edit in applied)
        counted["context_management"] = {"original_input_tokens": prompt_tokens + cleared}
    return counted


def prepared_prompt(model: PromptModel, body: PromptFields, sender: Sender) -> PreparedPrompt:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    body.refuse_unsupported()
    owner = sender.owner(body.cache_salt)
    conversation, _ = _edited(model, body, owner)
    return PreparedPrompt.of_chat(model.rendered_chat(conversation, owner))


def _edited(
    model: PromptModel, body: PromptFields, owner: PromptOwner
) -> tuple[Conversation, list[Json] | None]:
    """Returns the conversation after its edits, and the edits; None if the body asks for none."""
    conversation = body.conversation(model.model_tokenizer.template_names)

    def count(counted: Conversation) -> int:
        try:
            return len(model.rendered_chat(counted, owner).prompt.tokens)
        except PromptTextTooLong as error:
            return error.limit_tokens + 1  # at least: the edits may bring it below the limit

    found = edited(conversation, body.edits(), count)
    return found.conversation, None if body.context_management is None else list(map(dict, found.applied))


def _constraint(body: MessagesRequest) -> Constraint | None:
    """Returns the schema that the answer must follow. A keyword that cannot be enforced is ignored."""
    schema = body.json_schema()
    if schema is None:
        return None
    text, path = schema
    return Constraint(json_schema_of(text, path, strict=False), param=path)
