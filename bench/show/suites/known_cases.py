"""Cases of other servers' suites that do not pass here, each with the reason.

A case is known if its name and its message match. Any other failure fails the line J4: it is a defect, or has a
reason that is not written here. Each reason has the number of its cases in the last run of all suites. The table in
docs/clients.md has the sums, and J4 tells where a number differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

NOT_IMPLEMENTED = "not implemented"
DESIGN = "by design"
OWN = "not applicable"  # the other server's own routes, fields, words and options
MODEL = "model's text"  # that the scripted model does not write
FAULT = "the suite's fault"


@dataclass(frozen=True, slots=True)
class Known:
    kind: str
    cases: int
    why: str
    case: str = ""  # regular expressions that are searched
    message: str = ""

    def is_of(self, case: str, message: str) -> bool:
        return bool(re.search(self.case, case) and re.search(self.message, message))


def _refused(*fields: str) -> str:
    return f"'({'|'.join(fields)})' is not supported here"


_REFUSED_BY_NAME = Known(
    NOT_IMPLEMENTED,
    13,
    "fields that are refused by name: echo of a chat, prompt_logprobs, return_token_ids, suffix, beam search …",
    message=_refused(
        "allowed_token_ids", "echo", "include_reasoning", "no_stop_trim", "prompt_logprobs", "return_token_ids",
        "separate_reasoning", "skip_special_tokens", "suffix", "use_beam_search",
    ),
)  # fmt: skip
_IMAGES = Known(NOT_IMPLEMENTED, 1, "images", message="image_url|input_image|reads text only|reads no")
_HUB = Known(OWN, 1, "models from a hub", message=r"huggingface\.co|ConnectionError|couldn't connect")
_WORDS = Known(
    OWN, 5, "the other server's words of an error", message="Regex pattern did not match|expected code="
)
_BACKGROUND = Known(NOT_IMPLEMENTED, 2, "background responses", message=_refused("background"))

KNOWN: Mapping[str, Sequence[Known]] = {
    "openresponses": (
        Known(NOT_IMPLEMENTED, 7, "WebSockets: refused with 426", "^websocket-"),
    ),
    "llmprobe": (
        Known(
            FAULT,
            1,
            "it takes cached tokens for a part of Anthropic's input_tokens, which are disjoint",
            "^messages-usage$",
            "messages-usage-cached-bound",
        ),
    ),
    "vllm": (
        _REFUSED_BY_NAME,
        _WORDS,
        _BACKGROUND,
        Known(OWN, 48, "embeddings of a prompt, made in the test's process", "test_load_prompt_embeds"),
        Known(OWN, 5, "vLLM's options of a start: root path, forced usage, load tracking",
              r"test_root_path|force_include_usage|test_server_load"),
        Known(OWN, 5, "vLLM's own version, metrics in an answer and prompts of an answer",
              r"test_show_version|test_per_request_metrics|test_enable_response_messages|prompt_logprobs\]?.*None"),
        Known(OWN, 4, "vLLM's route /tokenizer_info", "test_tokenizer_info"),
        Known(OWN, 1, "vLLM's classes in the test's process", message="Absent"),
        Known(OWN, 1, "counts of another model's tokenizer", "test_completion::test_single_completion"),
        Known(NOT_IMPLEMENTED, 1, "all log-probabilities by -1", "test_top_logprobs", "-1"),
        Known(DESIGN, 1, "the first wrong key of logit_bias is named, not all", "test_chat_logit_bias_multiple"),
        Known(DESIGN, 1, "stream_options without a stream are ignored", "test_completion_stream_options"),
        Known(DESIGN, 1, "message_start counts the first token, as Anthropic's does", "test_anthropic_streaming$"),
        Known(FAULT, 1, "it adds the cached tokens to input_tokens, which are disjoint in Anthropic's API",
              "test_anthropic_streaming_cache_usage"),
        Known(DESIGN, 1, "an empty tool_choice asks for nothing", "test_inconsistent_tool_choice_and_tools"),
        Known(MODEL, 6, "reasoning", r"test_include_reasoning|reasoning_item|reasoning_tokens"),
        Known(MODEL, 10, "sums, names, moods and differing samples",
              r"responses\.test_basic::|test_previous_response_id|two_responses|test_structured_output"
              r"|test_parallel_|test_max_tokens|continue_final_message"),
        Known(MODEL, 16, "reasoning beside calls, several calls, other arguments for a second question",
              r"test_function_call::test_function_calling|test_function_tool_use|test_named_tool_use"),
    ),
    "llama.cpp": (
        _HUB,
        Known(OWN, 34, "llama.cpp's routes: /completion, /tokenize, /props, /slots, /apply-template",
              message=r"There is no|404|KeyError: 'content'|KeyError: 0"),
        Known(OWN, 23, "llama.cpp's fields: __verbose, timings, progress, telemetry, a fingerprint of its build",
              r"test_chat_template|test_verbose_debug|test_return_progress|timings_per_token|telemetry"
              r"|with_openai_library$|test_chat_completion\["),
        Known(OWN, 4, "tokens of llama.cpp's /tokenize, whose text is 'content'", "test_logit_bias|tokens_input"),
        Known(OWN, 4, "llama.cpp's options of a start: a small context, no multimodal model",
              r"context_size_exceeded|image$|vision_format"),
        Known(OWN, 1, "counts of another model's tokenizer", "cached_tokens"),
        Known(DESIGN, 3, "the first chunk's content is an empty text, as in OpenAI's API", message="'' is None"),
        Known(DESIGN, 2, "messages may be empty nowhere, and may end with two of the assistant",
              r"test_anthropic_empty_messages|test_invalid_chat_completion_req\[messages7\]"),
        Known(NOT_IMPLEMENTED, 2, "grammars in GBNF", message="GBNF"),
        Known(MODEL, 1, "a template that shows reasoning", "thinking_history|thinking_with_reasoning"),
        Known(MODEL, 4, "the words of stories260K",
              r"openai_library|test_completion_without_tool_call_fast"),
    ),
    "smg": (
        _REFUSED_BY_NAME,
        _IMAGES,
        replace(_HUB, cases=4),
        Known(NOT_IMPLEMENTED, 55, "MCP servers", message=r"mcp|MCP"),
        Known(NOT_IMPLEMENTED, 14, "conversations", message="/v1/conversations"),
        Known(NOT_IMPLEMENTED, 6, "tools that the server runs: search, files",
              message=r"url_citation|file_search|'tools\[0\]' is not supported"),
        Known(NOT_IMPLEMENTED, 4, "an answer's id by 'rid' or a header", "rid_becomes|rid_is_shared|x_request_id"),
        Known(OWN, 2, "the gateway's routes", message="/workers"),
        Known(OWN, 6, "the gateway's words of an error", "error_handling_invalid_tool_choice"),
        Known(DESIGN, 2, "definitions of each tool are its own", "test_conflicting_defs"),
        Known(DESIGN, 3, "ignore_eos, and a forced call beside a response_format, are no errors",
              "TestGptOssValidation"),
        Known(DESIGN, 1, "a video is a medium, which becomes a line of the prompt", "unknown_content_part_type"),
        Known(DESIGN, 2, "an answer without reasoning has no reasoning_content, rather than a null one",
              "without_reasoning", "reasoning_content"),
        Known(DESIGN, 4, "a stop sequence is never a part of the answer", "stop_sequences", "should be the suffix"),
        Known(FAULT, 4, "it sends the tool_choice of a chat to Responses", message="'tool_choice' is {'function'"),
        Known(MODEL, 24, "sums, cities, signs, reasoning, several calls, answers of a certain length",
              r"args_parsing|multi_tool_scenario|test_regex|multi_content_parts|test_response_prefill"
              r"|TestReasoningContentAPI|TestEnableThinking|test_reasoning_content|test_multiple_tools|with_system|temperature_zero"
              r"|structured_output_json_schema|test_basic_function_call"),
    ),
}  # fmt: skip


def known(suite: str, case: str, message: str) -> Known | None:
    """Returns the reason why a case does not pass, or None."""
    return next((one for one in KNOWN[suite] if one.is_of(case, message)), None)
