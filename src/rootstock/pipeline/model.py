"""Models as requests see them: a conversation becomes a prompt, a constraint, requests, and a parser of the answer.

Every wire format and the library call this pipeline. It knows neither HTTP nor any format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from rootstock.cache.families import FullAttention
from rootstock.cache.image_tokens import PlacedImage, placed_images
from rootstock.cache.retention.hint_types import CacheHints
from rootstock.engine.adapters import NamedAdapter
from rootstock.engine.build import Assembly
from rootstock.engine.clearing import Clearing
from rootstock.engine.engine import Engine
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import Request, StopParams, requests_for
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.stats import Cleared
from rootstock.errors import Unsupported
from rootstock.pipeline.next_turns import NextTurn, NextTurns
from rootstock.runtime.base import ImageReader, ModelDescription
from rootstock.text.constraints.asked import Constraint, JsonSchema, Lark
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.conversation.media import SentImages, mentioned, refuse_media, with_markers
from rootstock.text.conversation.template import TemplateInput, template_input
from rootstock.text.conversation.types import Conversation, IgnoredField
from rootstock.text.conversation.volatile_heads import DroppedHead, without_volatile_heads
from rootstock.text.output.deltas import CallEnded, CallStarted, Delta, DeltaParser, TextOnly
from rootstock.text.output.detect import detect, named, visible_tokens
from rootstock.text.output.formats import PLAIN, OutputFormat
from rootstock.text.output.grammar import call_grammar, call_or_answer_grammar
from rootstock.text.output.parser import OutputParser
from rootstock.text.output.reasoning_tokens import CountingParser
from rootstock.text.prompts.boundaries import chat_with_boundaries, chat_with_marks
from rootstock.text.prompts.fingerprint import Fingerprint, Fingerprints, fingerprint_of
from rootstock.text.prompts.prompt_tokenizer import ChatPrompt, PromptTokenizer, chat_prompt, escaped
from rootstock.text.prompts.sampled_answers import AnswerPlace
from rootstock.text.prompts.tenant_salt import PromptOwner
from rootstock.text.tokenizer import ModelTokenizer, text_with_special_tokens

_PROMPT_END_TOKENS = 64  # in which the parser looks for the opening of reasoning

EndOfTurn = Callable[[Sequence[str]], None]  # gets the texts of the answer's tokens


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Rules of the operator for all conversations with a model."""

    parse_special_tokens: bool = False  # special tokens in the text of messages are control tokens
    tool_parser: str = "auto"  # the format of calls and reasoning; "auto": found by rendering a call
    drop_volatile: bool = True  # lines that change at every request are dropped from the head of a chat
    refuses_media: bool = False  # an image or another medium is an error, rather than a line of the prompt


@dataclass(frozen=True)
class RenderedChat:
    """A conversation's prompt."""

    conversation: Conversation  # without the lines that were dropped
    template: TemplateInput
    prompt: ChatPrompt
    owner: PromptOwner
    dropped: tuple[DroppedHead, ...] = field(default=(), kw_only=True)
    adapter: str = field(default="", kw_only=True)
    sent: SentImages = field(default_factory=list, kw_only=True)  # images of the conversation
    images: tuple[PlacedImage, ...] = field(
        default=(), kw_only=True
    )  # the same, at their places in the prompt


@dataclass(frozen=True)
class PreparedChat(RenderedChat):
    """A conversation's prompt, and all that its answers need."""

    model: str
    new_parser: Callable[[], DeltaParser]
    visible_tokens: frozenset[int] = frozenset()  # that the parser must see
    constraint: CompiledConstraint | None = None
    ignored: tuple[IgnoredField, ...] = ()
    next_turn: EndOfTurn | None = None  # None: idle work is off

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.model, self.template, len(self.prompt.tokens))

    def requests(
        self,
        id: str,
        choices: int,
        sampling: ResolvedSampling,
        stop: StopParams,
        *,
        diagnose: bool = False,
        hints: CacheHints | None = None,
    ) -> tuple[Request, ...]:
        """Makes the requests of the answers."""
        return requests_for(
            id,
            [self.prompt.tokens],
            choices,
            sampling,
            stop,
            salt=self.owner.salt,
            boundaries=self.prompt.boundaries,
            visible_tokens=self.visible_tokens,
            place=self.prompt.place,
            constraint=self.constraint,
            diagnose=diagnose,
            hints=hints,
            adapter=self.adapter,
            images=self.images,
        )


class RememberingParser:
    """A parser that keeps the complete calls of an answer: a later prompt gets them back as the model wrote them.

    `end_turn` is called at the end of an answer without a call, where tools could be called.
    """

    def __init__(
        self, parser: DeltaParser, place: AnswerPlace, end_turn: Callable[[], None] | None = None
    ) -> None:
        self._parser = parser
        self._place = place
        self._end_turn = end_turn
        self._started: dict[int, CallStarted] = {}

    def push(self, text: str) -> list[Delta]:
        return self._noted(self._parser.push(text))

    def finish(self) -> list[Delta]:
        deltas = self._noted(self._parser.finish())
        if self._end_turn is not None and not self._started:
            self._end_turn()
        return deltas

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            match delta:
                case CallStarted(index):
                    self._started[index] = delta
                case CallEnded(index, arguments, raw) if arguments is not None:
                    call = self._started[index]
                    self._place.remember_call(call.id, call.name, arguments, raw)
        return deltas


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptModel:
    """The part of a model that makes prompts. It needs no weights."""

    name: str
    tokenizer: PromptTokenizer
    rules: ChatRules = ChatRules()
    wants_boundaries: bool = False  # the model resumes only at checkpoints: boundaries place them
    adapter: str = ""  # fingerprint of the LoRA adapter of its requests; empty: the base model
    images: ImageReader | None = None  # None: the model sees no images

    @property
    def model_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer.model_tokenizer

    def rendered_chat(self, conversation: Conversation, owner: PromptOwner) -> RenderedChat:
        """Renders and tokenizes: not for an event loop. Raises RequestError."""
        dropped: tuple[DroppedHead, ...] = ()
        first = conversation.messages[0].role if conversation.messages else ""
        if self.rules.drop_volatile and first in ("system", "developer"):
            conversation, dropped = without_volatile_heads(conversation)
        sent: SentImages = []
        if self.images is not None:
            read = partial(self.images.layout, owner=owner.share, salt=owner.salt)
            conversation, sent = with_markers(conversation, read)
        self.tokenizer.refuse_more_chars(conversation.count_chars())
        template = template_input(conversation, self.model_tokenizer)
        if self.rules.refuses_media:
            refuse_media(template.media)
        text = escaped(template, self.tokenizer, parse=self.rules.parse_special_tokens)
        make = chat_prompt
        if self.wants_boundaries:
            make = chat_with_boundaries
        elif text.marks:
            make = chat_with_marks
        prompt = make(text, self.tokenizer, owner)
        return RenderedChat(
            conversation,
            template,
            prompt,
            owner,
            dropped=dropped,
            adapter=self.adapter,
            sent=sent,
            images=_placed(prompt, sent) if sent else (),
        )


def _placed(prompt: ChatPrompt, sent: SentImages) -> tuple[PlacedImage, ...]:
    try:
        return placed_images(prompt.tokens, sent)
    except ValueError as error:
        raise Unsupported(
            "messages", f"The images cannot be placed: {error}. Send them elsewhere."
        ) from error


@dataclass(frozen=True, slots=True)
class ServedModel(PromptModel):
    """A loaded model and its engine: all that a request to it needs."""

    vocab_size: int
    defaults: SamplingDefaults
    context_limit: int  # tokens of a prompt and its answer
    most_requests: int  # running and waiting in the engine at once
    engine: Engine
    description: ModelDescription
    block_size: int  # tokens of a block of its cache
    reuses_prefixes: bool = True  # later requests find the prompts of earlier ones in the cache
    constraints: ConstraintCompiler | None = None  # None: the model has no tokenizer
    output: OutputFormat = PLAIN  # of the model's answers
    visible_tokens: frozenset[int] = frozenset()  # special tokens that its parser must see
    fingerprints: Fingerprints = field(default_factory=Fingerprints)  # of chats, by the id of their answer
    next_turns: NextTurns | None = None  # None: idle work is off
    parent: str | None = None  # of an adapter: the name of its base model

    @classmethod
    def of(
        cls,
        made: Assembly,
        rules: ChatRules | None = None,
        name: str | None = None,
        defaults: SamplingDefaults | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> ServedModel:
        """Makes the model of an engine. The caller starts and stops the engine. Raises InvalidOption.

        `name` and `defaults` replace the assembly's own. Models may share `fingerprints`.
        """
        engine, tokenizer, rules = made.engine, made.tokenizer, rules or ChatRules()
        prompts = PromptTokenizer(tokenizer, engine.context_limit, engine.config.answer_memory_bytes)
        next_turns = None
        if engine.parts.idle_prefills is not None:
            next_turns = NextTurns(engine, prompts, parse_special_tokens=rules.parse_special_tokens)
        is_auto = rules.tool_parser == "auto"
        output = detect(tokenizer) if is_auto else named(rules.tool_parser, tokenizer)
        families = made.description.families
        return cls(
            made.description.vocab_size,
            defaults or made.defaults,
            engine.context_limit,
            engine.config.max_batch + engine.config.max_queue,
            engine,
            made.description,
            made.block_size,
            name=name or made.description.name,
            tokenizer=prompts,
            rules=rules,
            wants_boundaries=not all(isinstance(family, FullAttention) for family in families),
            constraints=engine.constraints,
            output=output,
            visible_tokens=visible_tokens(output, tokenizer),
            reuses_prefixes=engine.reuses_prefixes,
            fingerprints=fingerprints or Fingerprints(),
            next_turns=next_turns,
            images=made.images,
        )

    def of_adapter(self, adapter: NamedAdapter) -> ServedModel:
        """Returns the same model with an adapter: it shares the engine and the tokenizer."""
        return replace(
            self,
            name=adapter.name,
            adapter=adapter.fingerprint,
            parent=self.parent or self.name,
        )

    def clear(self, clearing: Clearing) -> Cleared:
        """Removes cached prefixes, and the stored data of their texts. Raises the errors of `Engine.clear`."""
        if clearing.memory and not clearing.public:
            self.tokenizer.forget(clearing.salt)
            if self.images is not None:
                self.images.forget(clearing.salt)
            self.fingerprints.forget(clearing.salt)
        return self.engine.clear(clearing)

    def stored_tokens(self, prompt_tokens: int) -> int:
        """Returns how many tokens of a prompt later requests may find: the last one is always computed."""
        return prompt_tokens - 1 if self.reuses_prefixes else 0

    def prepared_chat(
        self,
        conversation: Conversation,
        owner: PromptOwner,
        asked: Constraint | None = None,
        reasoning_budget: int | None = None,
    ) -> PreparedChat:
        """Renders and tokenizes: not for an event loop. Raises RequestError.

        `asked` has the grammar of the answer's text, and `reasoning_budget` is in tokens. A forced call comes before
        the grammar: its arguments follow the tool's schema. Beside a JSON schema the model may call a tool.
        """
        rendered = self.rendered_chat(conversation, owner)
        conversation, prompt = rendered.conversation, rendered.prompt
        end = text_with_special_tokens(self.model_tokenizer, prompt.tokens[-_PROMPT_END_TOKENS:])
        constraint = self.compiled(self._constraint(conversation, asked, reasoning_budget, end), owner)
        tools = () if conversation.tool_choice.mode == "none" else conversation.tools
        output = self.output
        is_text = not output.has_reasoning and not (tools and output.has_calls)
        new_parser: Callable[[], DeltaParser] = TextOnly
        if not is_text:
            new_parser = partial(OutputParser, output, tools, end)
        end_turn = partial(self.engine.end_turn, prompt.tokens, owner.salt, self.adapter) if tools else None
        next_turn = None
        if self.next_turns is not None:
            chars = 4 * len(prompt.tokens) + sum(len(data) for _, data in rendered.sent)
            turn = NextTurn(conversation, owner, chars, new_parser, self.adapter, rendered.sent)
            next_turn = partial(self.next_turns.answered, turn)
        return PreparedChat(
            conversation,
            rendered.template,
            prompt,
            owner,
            self.name,
            new_parser
            if is_text
            else lambda: CountingParser(RememberingParser(new_parser(), prompt.place, end_turn)),
            frozenset() if is_text else self.visible_tokens,
            constraint=constraint,
            dropped=rendered.dropped,
            ignored=self._ignored(conversation, rendered.template),
            next_turn=next_turn,
            adapter=rendered.adapter,
            sent=rendered.sent,
            images=rendered.images,
        )

    def _ignored(self, conversation: Conversation, template: TemplateInput) -> tuple[IgnoredField, ...]:
        if not conversation.ignored and not template.media:
            return ()
        reasons = self.output.shows_reasoning
        ignored = [one for one in conversation.ignored if one.wants_reasoning is not reasons]
        return (*ignored, *mentioned(template.media))

    def _constraint(
        self,
        conversation: Conversation,
        asked: Constraint | None,
        reasoning_budget: int | None,
        prompt_end: str,
    ) -> Constraint | None:
        choice = conversation.tool_choice
        if choice.mode == "required":
            grammar = call_grammar(self.output, conversation.tools, choice)
            if grammar is None:
                remedy = "The model's chat template writes no calls that the server can force. Send 'auto'."
                raise Unsupported("tool_choice", remedy)
            asked = Constraint(Lark(grammar), param="tool_choice")
        elif choice.mode == "auto" and asked is not None and isinstance(asked.grammar, JsonSchema):
            grammar = call_or_answer_grammar(
                self.output, conversation.tools, choice, asked.grammar, asked.param
            )
            asked = asked if grammar is None else replace(asked, grammar=Lark(grammar))
        if asked is None and reasoning_budget is None:
            return None
        found = self.output.reasoning_around_answers(prompt_end, calls=choice.mode == "required")
        reasoning = None if found is None else replace(found, budget_tokens=reasoning_budget)
        return replace(asked or Constraint(param="reasoning_budget"), reasoning=reasoning)

    def compiled(self, constraint: Constraint | None, owner: PromptOwner) -> CompiledConstraint | None:
        """Compiles a constraint: not for an event loop.

        Raises ConstraintRefused, InvalidParameter, Unsupported, CompilerBusy and EngineStopped.
        """
        if constraint is None or (constraint.grammar is None and constraint.reasoning is None):
            return None
        if self.constraints is None:
            raise Unsupported(constraint.param, "This model has no tokenizer. Leave it out.")
        return self.constraints.compile(constraint, owner)
