from __future__ import annotations

import pytest

from rootstock.errors import InvalidOption
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.output.detect import detect, for_tokenizer, named, visible_tokens
from rootstock.text.output.formats import OUTPUT_FORMATS, THINK, Harmony, ReasoningMarks
from text.output.templates import TemplateTokenizer

TURNS = """{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ "\n" }}
{%- if message.reasoning_content is defined %}THINKING{% endif -%}
{{ message.content or "" }}
{%- if message.tool_calls is defined %}CALLS{% endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}"""
EACH = "{% for call in message.tool_calls %}CALL{% endfor %}"
JSON = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
PARAMETERS = JSON.replace("arguments", "parameters", 1)
ARRAY = f"[{{% for call in message.tool_calls %}}{JSON}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"
HEADER = "{{ call.function.arguments | tojson }}"
ITEMS = "{% for key, value in call.function.arguments.items() %}ITEM{% endfor %}"
VALUE = "{{ value if value is string else value | tojson }}"
PYTHONIC_ITEM = "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}"
CALLS = {
    "hermes": EACH.replace("CALL", f"<tool_call>\n{JSON}\n</tool_call>"),
    "llama3_json": EACH.replace("CALL", PARAMETERS),
    "mistral_json": f"[TOOL_CALLS]{ARRAY}",
    "granite": f"<|tool_call|>{ARRAY}",
    "nemotron": f"<TOOLCALL>{ARRAY}</TOOLCALL>",
    "mistral": EACH.replace("CALL", f"[TOOL_CALLS]{{{{ call.function.name }}}}[ARGS]{HEADER}"),
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + EACH.replace(
        "CALL", f"<｜tool▁call▁begin｜>{{{{ call.function.name }}}}<｜tool▁sep｜>{HEADER}<｜tool▁call▁end｜>"
    )
    + "<｜tool▁calls▁end｜>",
    "apertus": "<|tools_prefix|>["
    + EACH.replace("CALL", f'{{"{{{{ call.function.name }}}}": {HEADER}}}{{{{ ", " if not loop.last }}}}')
    + "]<|tools_suffix|>",
    "solar_open": "<|tool_calls|>"
    + EACH.replace(
        "CALL",
        "<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ call.function.name }}<|tool_call:args|>"
        f"{HEADER}<|tool_call:end|>",
    )
    + "<|calls|>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + EACH.replace(
        "CALL",
        "<|tool_call_begin|>functions.{{ call.function.name }}:0<|tool_call_argument_begin|>"
        f"{HEADER}<|tool_call_end|>",
    )
    + "<|tool_calls_section_end|>",
    "qwen3_coder": EACH.replace(
        "CALL",
        "<tool_call>\n<function={{ call.function.name }}>\n"
        + ITEMS.replace("ITEM", "<parameter={{ key }}>\n" + VALUE + "\n</parameter>\n")
        + "</function>\n</tool_call>",
    ),
    "glm47": EACH.replace(
        "CALL",
        "<tool_call>{{ call.function.name }}"
        + ITEMS.replace("ITEM", "<arg_key>{{ key }}</arg_key><arg_value>" + VALUE + "</arg_value>")
        + "</tool_call>",
    ),
    "hy3": "<tool_calls:opensource>\n"
    + EACH.replace(
        "CALL",
        "<tool_call:opensource>{{ call.function.name }}<tool_sep:opensource>\n"
        + ITEMS.replace(
            "ITEM",
            "<arg_key:opensource>{{ key }}</arg_key:opensource>\n"
            f"<arg_value:opensource>{VALUE}</arg_value:opensource>\n",
        )
        + "</tool_call:opensource>\n",
    )
    + "</tool_calls:opensource>",
    "minimax_m2": "<minimax:tool_call>\n"
    + EACH.replace(
        "CALL",
        '<invoke name="{{ call.function.name }}">\n'
        + ITEMS.replace("ITEM", '<parameter name="{{ key }}">' + VALUE + "</parameter>\n")
        + "</invoke>\n",
    )
    + "</minimax:tool_call>",
    "lfm2": "<|tool_call_start|>["
    + EACH.replace("CALL", "{{ call.function.name }}(" + ITEMS.replace("ITEM", PYTHONIC_ITEM) + ")")
    + "]<|tool_call_end|>",
}
QWEN_THOUGHTS = "<think>\n{{ message.reasoning_content }}\n</think>\n\n"


def tokenizer(calls: str = "", thoughts: str = "", end: str = "") -> TemplateTokenizer:
    template = TURNS.replace("CALLS", calls).replace("THINKING", thoughts)
    return TemplateTokenizer(
        template.replace("<|assistant|>{% endif -%}", f"<|assistant|>{end}{{% endif -%}}")
    )


@pytest.mark.parametrize("name", CALLS)
def test_the_format_of_calls_is_found_from_a_rendered_call(name: str) -> None:
    assert detect(tokenizer(CALLS[name])).name == name


def test_a_template_that_takes_arguments_as_text_is_understood() -> None:
    text = "<tool_call>\n" + JSON.replace("call.function.arguments | tojson", '"" + call.function.arguments')
    assert detect(tokenizer(EACH.replace("CALL", text + "\n</tool_call>"))).name == "hermes"


def test_a_template_without_calls_parses_none() -> None:
    found = detect(tokenizer())
    assert not found.has_calls
    assert not detect(ByteTokenizer()).has_calls


def test_calls_of_an_unknown_form_stay_text(caplog: pytest.LogCaptureFixture) -> None:
    found = detect(tokenizer(EACH.replace("CALL", f"CALL {{{{ call.function.name }}}}: {HEADER}")))
    assert not found.has_calls
    assert "unknown form" in caplog.text


def test_a_template_that_leaves_calls_out_names_the_format_in_its_instructions() -> None:
    instructions = "{{ 'Answer within <tool_call>{...}</tool_call>.' }}"
    template = tokenizer().source + instructions
    assert detect(TemplateTokenizer(template)).name == "hermes"


def test_a_template_of_harmony_is_found() -> None:
    calls = (
        "{% for call in message.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}"
        f"<|channel|>commentary json<|message|>{HEADER}<|call|>{{% endfor %}}"
    )
    found = detect(tokenizer(calls))
    assert isinstance(found.shape, Harmony)


# ---- reasoning


def marks_of(found_in: TemplateTokenizer) -> ReasoningMarks | None:
    shape = detect(found_in).shape
    assert not isinstance(shape, Harmony)
    return shape.reasoning


@pytest.mark.parametrize(
    ("thoughts", "marks"),
    [
        (QWEN_THOUGHTS, THINK),
        ("[THINK]{{ message.reasoning_content }}[/THINK]", ReasoningMarks("[THINK]", "[/THINK]")),
        (
            "<|START_THINKING|>{{ message.thinking }}<|END_THINKING|>",
            ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        (
            "<|channel>thought\n{{ message.reasoning }}\n<channel|>",
            ReasoningMarks("<|channel>thought\n", "<channel|>"),
        ),
        ("<|think|>{{ message.reasoning }}<|end|>", ReasoningMarks("<|think|>", "<|end|>")),
        ("<my:thought>{{ message.reasoning }}</my:thought>", ReasoningMarks("<my:thought>", "</my:thought>")),
    ],
)
def test_the_marks_of_reasoning_are_found_around_rendered_thoughts(
    thoughts: str, marks: ReasoningMarks
) -> None:
    assert marks_of(tokenizer(thoughts=thoughts)) == marks


def test_a_prompt_that_opens_or_closes_reasoning_shows_the_marks() -> None:
    assert marks_of(tokenizer(end="<think>\n")) == THINK
    switched = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    assert marks_of(tokenizer(end=switched)) == THINK
    assert marks_of(tokenizer()) is None


def test_a_template_that_cuts_reasoning_off_shows_the_marks() -> None:
    cut = "{{ message.content.split('</think>')[-1] if message.content is string else '' }}"
    assert marks_of(tokenizer(thoughts=cut)) == THINK


def test_the_marks_of_turns_are_no_marks_of_reasoning() -> None:
    assert marks_of(tokenizer(thoughts="<|im_start|>{{ message.reasoning }}<|im_end|>")) is None


def test_reasoning_begins_in_the_prompt_if_its_end_opens_it() -> None:
    hermes = OUTPUT_FORMATS["hermes"].with_reasoning(THINK)
    assert hermes.begins_in_reasoning("<|assistant|>\n<think>\n")
    assert not hermes.begins_in_reasoning("<|assistant|>\n<think>\n\n</think>\n\n")
    assert not hermes.begins_in_reasoning("I say <think><|assistant|>")
    assert not OUTPUT_FORMATS["hermes"].begins_in_reasoning("<think>")


# ---- names and tokens


def test_a_format_can_be_named() -> None:
    found = named("qwen3_coder", tokenizer(thoughts=QWEN_THOUGHTS))
    assert found.name == "qwen3_coder"
    assert not isinstance(found.shape, Harmony)
    assert found.shape.reasoning == THINK
    with pytest.raises(InvalidOption, match=r"hermes.*qwen3_coder"):
        named("qwen4", ByteTokenizer())


class MarkedTokenizer(ByteTokenizer):
    SPECIAL = (*ByteTokenizer.SPECIAL, "<|tool_call|>", "[ARGS]", "<|channel>")
    vocab_size = 256 + len(SPECIAL)


def test_the_tokens_of_marks_are_known_and_visible_but_for_the_end_of_the_answer() -> None:
    tokens = MarkedTokenizer()
    granite = for_tokenizer(OUTPUT_FORMATS["granite"], tokens)
    assert granite.tokens == {"<|tool_call|>": 256 + MarkedTokenizer.SPECIAL.index("<|tool_call|>")}
    assert visible_tokens(granite, tokens) == set(granite.tokens.values())
    harmony = for_tokenizer(OUTPUT_FORMATS["harmony"], tokens)
    assert set(harmony.tokens) == {"<|end|>"}
    assert visible_tokens(harmony, tokens) == set()


def test_a_token_within_a_mark_is_found() -> None:
    gemma = OUTPUT_FORMATS["gemma4"].with_reasoning(ReasoningMarks("<|channel>thought\n", "<channel|>"))
    assert set(for_tokenizer(gemma, MarkedTokenizer()).tokens) == {"<|channel>"}
