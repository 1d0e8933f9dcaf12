from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock.text.conversation.types import Tool
from rootstock.text.output import calls as calls_module
from rootstock.text.output.answer import MAX_HELD_CHARS
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    Markup,
    ReasoningDelta,
    source,
)
from rootstock.text.output.formats import OUTPUT_FORMATS, PLAIN, THINK, OutputFormat, ReasoningMarks
from rootstock.text.output.parser import OutputParser, parsed
from rootstock.text.output.writing import written
from text.output import answers

every_format = pytest.mark.parametrize("format", answers.CALL_FORMATS, ids=lambda format: format.name)
HERMES = OUTPUT_FORMATS["hermes"].with_reasoning(THINK)
CODER = OUTPUT_FORMATS["qwen3_coder"].with_reasoning(THINK)
LLAMA = OUTPUT_FORMATS["llama3_json"]
HARMONY = OUTPUT_FORMATS["harmony"]
TOOL = Tool("look_up", None, {"type": "object", "properties": {"word": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "owl"}}\n</tool_call>'


def whole(format: OutputFormat, text: str, tools: Sequence[Tool] = (TOOL,), prompt: str = "") -> list[Delta]:
    deltas = parsed(format, text, tools, prompt, answers.numbered())
    assert "".join(map(source, deltas)) == text
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def reasoning_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


def arguments_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))


# ---- every format


@every_format
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_calls_are_read_back_however_the_text_is_cut(format: OutputFormat, seed: int) -> None:
    rng = random.Random(seed)
    calls = answers.calls_for(format, rng)
    text = written(format, calls)
    deltas = answers.streamed(format, [text])
    assert answers.found_calls(deltas) == calls
    assert text_of(deltas) == ""
    assert answers.streamed(format, answers.cut_at_random(rng, text)) == deltas


@every_format
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_damaged_answers_lose_no_text_and_do_not_depend_on_the_cuts(format: OutputFormat, seed: int) -> None:
    rng = random.Random(seed)
    format = answers.with_think(format)
    calls = written(format, answers.calls_for(format, rng))
    text = answers.damaged(format, rng, f"<think>\nhm\n</think>\nText.\n{calls}")
    deltas = answers.streamed(format, [text])
    assert "".join(map(source, deltas)) == text
    assert answers.streamed(format, answers.cut_at_random(rng, text)) == deltas


@every_format
@settings(max_examples=5)
@given(data=st.data())
def test_any_text_loses_nothing(format: OutputFormat, data: st.DataObject) -> None:
    pieces = st.sampled_from(
        [*sorted(format.marks), '{"name": "look_up", "arguments": {', "look_up", "[", "(", " "]
    )
    text = "".join(data.draw(st.lists(st.one_of(pieces, st.text(max_size=5)), max_size=30)))
    deltas = answers.streamed(answers.with_think(format), [text])
    assert "".join(map(source, deltas)) == text
    assert answers.streamed(answers.with_think(format), list(text)) == deltas


@every_format
def test_text_before_calls_is_text_and_the_space_between_is_markup(format: OutputFormat) -> None:
    calls = [("look_up", {"word": "owl"})]
    text = written(format, calls)
    if format is HARMONY:
        text = f"<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant{text}"
    else:
        text = f"One moment.\n\n{text}"
    deltas = answers.streamed(format, list(text))
    assert text_of(deltas) == "One moment."
    assert answers.found_calls(deltas) == calls


@every_format
def test_without_tools_calls_are_text(format: OutputFormat) -> None:
    text = written(format, [("look_up", {"word": "owl"})])
    deltas = answers.streamed(format, [text], tools=())
    assert not answers.found_calls(deltas)
    assert "owl" in text_of(deltas)


@every_format
def test_a_call_cut_off_by_the_end_has_no_arguments(format: OutputFormat) -> None:
    text = written(format, [("look_up", {"word": "barn owl"})])
    text = text[: text.index("owl")]
    deltas = answers.streamed(format, [text])
    assert answers.found_calls(deltas) == [("look_up", None)]
    assert "".join(map(source, deltas)) == text
    assert "barn" in arguments_of(deltas)


@every_format
def test_the_beginning_of_a_marker_is_held_back_only_while_it_may_become_one(format: OutputFormat) -> None:
    parser = OutputParser(format, [TOOL], answers.PROMPTS.get(format.name, ""), answers.numbered())
    parser.push("<|channel|>final<|message|>" if format is HARMONY else "x")
    for mark in sorted(format.marks):
        given = text_of([*parser.push(f"a{mark[:-1]}"), *parser.push("\x00z")])
        assert given.endswith("\x00z"), mark


def test_work_grows_in_proportion_to_the_text() -> None:
    def calls_of(size: int, format: OutputFormat, unit: str) -> int:
        return answers.calls_to_parse(OutputParser(format, [TOOL]), unit, size)

    for format in (HERMES, CODER, LLAMA, OUTPUT_FORMATS["pythonic"], OUTPUT_FORMATS["gemma4"]):
        for unit in ("<tool_call>", "{", '{"name": "', "[look_up(", "<|tool_call>call:look_up{a:", " \n"):
            assert calls_of(400, format, unit) < 2.5 * calls_of(200, format, unit) + 2000, (format.name, unit)


# ---- reasoning


def test_reasoning_text_and_calls_are_told_apart() -> None:
    assert whole(HERMES, f"<think>\nhm\n</think>\n\nSure.\n\n{CALL}") == [
        Markup("<think>\n"),
        ReasoningDelta("hm"),
        Markup("\n</think>\n\n"),
        ContentDelta("Sure."),
        Markup("\n\n"),
        CallStarted(0, "call_" + "0" * 24, "look_up"),
        CallArguments(0, '{"word": "owl"}'),
        CallEnded(0, {"word": "owl"}, CALL),
    ]


def test_a_prompt_may_open_the_reasoning() -> None:
    deltas = whole(HERMES, "hm</think>So.", prompt="<|im_start|>assistant\n<think>\n")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "So.")
    closed = whole(HERMES, "So.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (reasoning_of(closed), text_of(closed)) == ("", "So.")


def test_a_model_may_open_again_what_the_prompt_has_opened() -> None:
    deltas = whole(HERMES, "<think>hm</think>So.", prompt="<think>")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "So.")


def test_the_marks_within_text_are_text() -> None:
    text = "Write <think> before and </think> after it."
    assert text_of(whole(HERMES, text)) == text


def test_a_closing_mark_alone_at_the_start_is_markup() -> None:
    assert whole(HERMES, "</think>\nSo.") == [Markup("</think>\n"), ContentDelta("So.")]


def test_reasoning_goes_on_after_the_mention_of_a_marker() -> None:
    deltas = whole(HERMES, "<think>I write <tool_call> then.</think>So.")
    assert (reasoning_of(deltas), text_of(deltas)) == ("I write <tool_call> then.", "So.")


def test_a_call_of_a_known_tool_ends_reasoning_that_was_not_closed() -> None:
    deltas = whole(HERMES, f"<think>hm\n{CALL}\nDone.")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "Done.")
    assert answers.found_calls(deltas) == [("look_up", {"word": "owl"})]
    unknown = whole(HERMES, f"<think>hm\n{CALL.replace('look_up', 'other')}</think>Done.")
    assert not answers.found_calls(unknown)
    assert text_of(unknown) == "Done."


def test_reasoning_without_an_end_is_all_reasoning() -> None:
    deltas = whole(HERMES, "<think>hm, and")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm, and", "")


def test_the_whitespace_of_an_answer_is_its_own() -> None:
    assert text_of(whole(PLAIN, "  a\n\n")) == "  a\n\n"
    assert text_of(whole(HERMES, "  a  \n")) == "  a  \n"


def test_a_long_run_of_spaces_is_not_held_back() -> None:
    parser = OutputParser(HERMES, [TOOL])
    held = sum(len(text_of(parser.push(" " * 100))) for _ in range(100))
    assert held > 8_000
    assert held + len(text_of(parser.finish())) == 10_000


def test_marks_of_other_forms_enclose_reasoning() -> None:
    gemma = OUTPUT_FORMATS["gemma4"].with_reasoning(ReasoningMarks("<|channel>thought\n", "<channel|>"))
    deltas = whole(gemma, "<|channel>thought\nhm\n<channel|>So.")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "So.")


def test_messages_with_marks_around_them_are_reasoning_text_and_calls() -> None:
    solar = OUTPUT_FORMATS["solar_open"].with_reasoning(ReasoningMarks("<|think|>", "<|end|>"))
    call = written(solar, [("look_up", {"word": "owl"})])
    text = f"<|think|>hm<|end|><|begin|>assistant<|content|>Wait.<|end|><|begin|>assistant{call}"
    deltas = whole(solar, text, prompt="<|begin|>assistant")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "Wait.")
    assert answers.found_calls(deltas) == [("look_up", {"word": "owl"})]


# ---- harmony


def test_the_channels_of_harmony_are_reasoning_text_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
        '{"word": "owl"}<|call|>'
    )
    deltas = whole(HARMONY, text, prompt="<|end|><|start|>assistant")
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "Wait.")
    assert answers.found_calls(deltas) == [("look_up", {"word": "owl"})]


def test_a_harmony_call_ends_with_the_answer_whose_last_token_is_hidden() -> None:
    text = ' to=functions.look_up<|channel|>commentary json<|message|>{"word": "owl"}'
    assert answers.found_calls(whole(HARMONY, text, prompt="<|start|>assistant")) == [
        ("look_up", {"word": "owl"})
    ]


def test_harmony_without_a_header_is_text_at_once() -> None:
    parser = OutputParser(HARMONY, [TOOL], "<|start|>assistant")
    assert parser.push("Hello") == [ContentDelta("Hello")]


def test_a_harmony_prompt_may_begin_a_message() -> None:
    prompt = "<|start|>assistant<|channel|>final<|message|>"
    assert whole(HARMONY, "Yes.<|return|>", prompt=prompt) == [ContentDelta("Yes."), Markup("<|return|>")]


def test_a_message_to_a_built_in_tool_of_harmony_is_reasoning() -> None:
    text = "<|channel|>analysis to=python code<|message|>print(1)<|end|>"
    assert reasoning_of(whole(HARMONY, text, prompt="<|start|>assistant")) == "print(1)"


@pytest.mark.parametrize("end", ["<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>"])
def test_a_harmony_call_without_a_body_has_no_arguments(end: str) -> None:
    deltas = whole(
        HARMONY,
        f" to=functions.look_up<|channel|>commentary json<|message|>{end}",
        prompt="<|start|>assistant",
    )
    assert answers.found_calls(deltas) == [("look_up", {})]
    assert text_of(deltas) == ""


# ---- calls in JSON


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"word": "owl"}, "name": "look_up"}',
        '{"name": "look_up", "parameters": {"word": "owl"}}',
        '{"name": "look_up", "arguments": "{\\"word\\": \\"owl\\"}"}',
        '{"type": "function", "function": {"name": "look_up", "arguments": {"word": "owl"}}}',
        '{"id": "1", "name": "look_up", "arguments": {"word": "owl"}}',
        '[{"name": "look_up", "arguments": {"word": "owl"}}]',
        '{"name": "look_up", "arguments": {"word": "owl"}',
    ],
)
def test_usual_variants_of_a_call_in_json_are_read(text: str) -> None:
    deltas = whole(HERMES, f"<tool_call>\n{text}\n</tool_call>")
    assert answers.found_calls(deltas) == [("look_up", {"word": "owl"})]
    assert text_of(deltas) == ""


def test_the_name_of_a_call_may_be_the_key_of_its_arguments() -> None:
    apertus = OUTPUT_FORMATS["apertus"]
    text = (
        '<|tools_prefix|>[{"look_up": {"word": "owl"}}, {"name": "look_up", "arguments": {}}]<|tools_suffix|>'
    )
    deltas = whole(apertus, text)
    assert answers.found_calls(deltas) == [("look_up", {"word": "owl"}), ("look_up", {})]
    assert text_of(deltas) == ""


@pytest.mark.parametrize("text", ['{"name": "look_up"}', '{"name": "look_up", "arguments": null}'])
def test_a_call_without_arguments_has_an_empty_object(text: str) -> None:
    deltas = whole(HERMES, f"<tool_call>{text}</tool_call>")
    assert answers.found_calls(deltas) == [("look_up", {})]
    assert arguments_of(deltas) == "{}"


def test_a_marker_within_a_string_is_part_of_it() -> None:
    deltas = whole(HERMES, CALL.replace("owl", "</tool_call><tool_call>"))
    assert answers.found_calls(deltas) == [("look_up", {"word": "</tool_call><tool_call>"})]


def test_a_line_break_within_a_string_is_escaped() -> None:
    deltas = whole(HERMES, CALL.replace("owl", "two\nlines\t"))
    assert arguments_of(deltas) == '{"word": "two\\nlines\\t"}'
    assert answers.found_calls(deltas) == [("look_up", {"word": "two\nlines\t"})]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "look_up", "arguments": {"word": "%s"}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"arguments": {"word": "%s"}, "name": "look_up"}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "look_up", "arguments": "{\\"word\\": \\"%s\\"}"}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "look_up", "arguments": "{\\"word\\": \\"\\%s\\"}"}\n</tool_call>'),
        (OUTPUT_FORMATS["pythonic"], "[look_up(word='%s')]"),
        (
            OUTPUT_FORMATS["deepseek_v32"],
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="word" '
            'string="false">"%s"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ),
    ],
)
@pytest.mark.parametrize(
    "half", ["\\ud83d", "\\ude00", "\\ud83d\\u0041", "\\ude00\\ud83d", "\\ud83d\\ud83d\\ude00"]
)
def test_half_of_a_surrogate_pair_becomes_a_replacement_character(
    format: OutputFormat, text: str, half: str
) -> None:
    answer = text.replace("%s", half)
    deltas = whole(format, answer)
    [ended] = [delta for delta in deltas if isinstance(delta, CallEnded)]
    expected = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(f'"{half}"'))
    assert ended.arguments == json.loads(arguments_of(deltas)) == {"word": expected}
    assert "\ufffd" in expected
    parser = OutputParser(format, [TOOL])
    cut = [delta for char in answer for delta in parser.push(char)] + parser.finish()
    assert arguments_of(cut) == arguments_of(deltas)


def test_a_malformed_call_whose_tool_is_not_known_yet_is_text() -> None:
    text = "<tool_call>\nlet me see\n</tool_call> so"
    assert text_of(whole(HERMES, text)) == text


def test_a_malformed_call_shows_its_arguments_and_has_none() -> None:
    text = '<tool_call>\n{"name": "look_up", "arguments": {"word": owl]}}\n</tool_call>'
    deltas = whole(HERMES, text + CALL)
    assert answers.found_calls(deltas) == [("look_up", None), ("look_up", {"word": "owl"})]
    ended = next(delta for delta in deltas if isinstance(delta, CallEnded))
    assert ended.raw == text


def test_the_opening_of_the_next_call_ends_a_malformed_one() -> None:
    text = '<tool_call>{"name": "look_up", "arguments": {"word": \n<tool_call>'
    deltas = whole(HERMES, text + CALL.removeprefix("<tool_call>"))
    assert answers.found_calls(deltas) == [("look_up", None), ("look_up", {"word": "owl"})]


@pytest.mark.parametrize(
    "text", ['{"word": NaN}', '{"word": 1e999}', '{"word": ' + "9" * 5000 + "}", "[1]", '"x"']
)
def test_arguments_that_are_no_json_object_are_none(text: str) -> None:
    deltas = whole(HERMES, CALL.replace('{"word": "owl"}', text))
    assert answers.found_calls(deltas) == [("look_up", None)]


@pytest.mark.parametrize(
    ("written_text", "text"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d", "\ufffd"),
        (r"a\uDE00b", "a\ufffdb"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\\ud83d", r"\ud83d"),
    ],
)
def test_half_of_a_surrogate_pair_is_a_replacement_character(written_text: str, text: str) -> None:
    deltas = whole(HERMES, CALL.replace("owl", written_text))
    assert answers.found_calls(deltas) == [("look_up", {"word": text})]
    assert json.loads(arguments_of(deltas)) == {"word": text}
    within = CALL.replace('{"word": "owl"}', json.dumps(f'{{"word": "{written_text}"}}'))
    deltas = whole(HERMES, within)
    assert answers.found_calls(deltas) == [("look_up", {"word": text})]
    arguments_of(deltas).encode()
    python = whole(OUTPUT_FORMATS["pythonic"], f"[look_up(word='{written_text}')]")
    assert answers.found_calls(python) == [("look_up", {"word": text})]


@pytest.mark.parametrize("open", ['{"a":', "["])
def test_nesting_beyond_the_limit_is_malformed(open: str) -> None:
    text = CALL.replace('"owl"', open * 5_000)
    assert answers.found_calls(whole(HERMES, text)) == [("look_up", None)]


def test_a_tool_that_the_request_does_not_have_is_called_within_markers_only() -> None:
    assert answers.found_calls(whole(HERMES, CALL.replace("look_up", "other"))) == [
        ("other", {"word": "owl"})
    ]
    text = '{"name": "other", "parameters": {}}'
    assert text_of(whole(LLAMA, text)) == text


@pytest.mark.parametrize("name", ["", "two words", "a" * 300, "<b>"])
def test_a_text_that_is_no_name_calls_nothing(name: str) -> None:
    text = CALL.replace("look_up", name)
    assert text_of(whole(HERMES, text)) == text


def test_an_object_of_an_answer_in_json_is_text_as_soon_as_it_is_no_call() -> None:
    parser = OutputParser(LLAMA, [TOOL])
    assert text_of(parser.push('{"birds": [')) == '{"birds": ['


def test_a_bare_call_begins_a_line() -> None:
    call = '{"name": "look_up", "parameters": {"word": "owl"}}'
    assert text_of(whole(LLAMA, f"Write {call}")) == f"Write {call}"
    assert answers.found_calls(whole(LLAMA, f"Now:\n{call}")) == [("look_up", {"word": "owl"})]
    assert answers.found_calls(whole(LLAMA, f"<|python_tag|>{call}")) == [("look_up", {"word": "owl"})]


def test_arguments_that_wait_for_a_name_are_bounded() -> None:
    parser = OutputParser(HERMES, [TOOL])
    parser.push('<tool_call>{"arguments": {"word": "')
    given = 0
    for _ in range(100):
        given += len(text_of(parser.push("x" * 1_000)))
    assert given > 100_000 - MAX_HELD_CHARS


def test_the_number_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.text.output.answer.MAX_CALLS", 2)
    assert calls_module.MAX_CALLS > 2
    deltas = whole(HERMES, CALL * 3)
    assert len(answers.found_calls(deltas)) == 2
    assert text_of(deltas) == CALL


# ---- ids


def test_ids_are_random_unless_the_template_wants_others() -> None:
    parser = OutputParser(HERMES, [TOOL])
    ids = [delta.id for delta in parser.push(CALL * 2) if isinstance(delta, CallStarted)]
    assert len(set(ids)) == 2
    assert all(len(id) == 29 and id.startswith("call_") for id in ids)


def test_mistral_ids_have_nine_letters_and_digits() -> None:
    mistral = OUTPUT_FORMATS["mistral"]
    text = "[TOOL_CALLS]look_up[CALL_ID]abc123DEF[ARGS]{}[TOOL_CALLS]look_up[CALL_ID]odd[ARGS]{}"
    ids = [delta.id for delta in whole(mistral, text) if isinstance(delta, CallStarted)]
    assert ids == ["abc123DEF", "000000000"]


def test_solar_ids_have_ten_lowercase_letters_and_digits() -> None:
    call = "<|tool_call:begin|>{}<|tool_call:name|>look_up<|tool_call:args|>{{}}<|tool_call:end|>"
    text = f"<|tool_calls|>{call.format('a1b2c3d4e5')}{call.format('Odd')}<|calls|>"
    deltas = whole(OUTPUT_FORMATS["solar_open"], text)
    assert answers.found_calls(deltas) == [("look_up", {})] * 2
    ids = [delta.id for delta in deltas if isinstance(delta, CallStarted)]
    assert ids == ["a1b2c3d4e5", "0000000000"]


def test_kimi_ids_are_the_models_own_and_never_twice_the_same() -> None:
    kimi = OUTPUT_FORMATS["kimi_k2"]
    call = "<|tool_call_begin|>functions.look_up:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    ids = [delta.id for delta in whole(kimi, text) if isinstance(delta, CallStarted)]
    assert ids == ["functions.look_up:4", "functions.look_up:1"]


@pytest.mark.parametrize("id", ["", r"\ud800", "two words", "a" * 300])
def test_a_text_that_is_no_id_is_replaced(id: str) -> None:
    call = f'{{"id": "{id}", "name": "look_up", "arguments": {{}}}}'
    deltas = whole(OUTPUT_FORMATS["kimi_k2"], f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>")
    assert [delta.id for delta in deltas if isinstance(delta, CallStarted)] == ["functions.look_up:0"]


# ---- calls in tags


def coder(value: str) -> str:
    return (
        f"<tool_call>\n<function=look_up>\n<parameter=word>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


def test_text_in_tags_keeps_its_lines() -> None:
    assert answers.found_calls(whole(CODER, coder("\n  a\n\n"))) == [("look_up", {"word": "\n  a\n\n"})]


def test_a_long_string_in_tags_streams() -> None:
    parser = OutputParser(CODER, [TOOL])
    parser.push("<tool_call><function=look_up><parameter=word>")
    assert arguments_of(parser.push("a line\nand")) == '"a line\\nand'


def test_tags_may_lack_their_section_and_hold_json() -> None:
    bare = coder("owl").removeprefix("<tool_call>\n")
    assert answers.found_calls(whole(CODER, bare)) == [("look_up", {"word": "owl"})]
    text = '<function=look_up>{"word": "owl"}</function>'
    assert answers.found_calls(whole(CODER, text)) == [("look_up", {"word": "owl"})]
    assert answers.found_calls(whole(CODER, CALL)) == [("look_up", {"word": "owl"})]


def test_text_between_tags_makes_a_call_malformed() -> None:
    text = coder("owl").replace("</parameter>", "</parameter> and")
    deltas = whole(CODER, text)
    assert answers.found_calls(deltas) == [("look_up", None)]
    assert arguments_of(deltas) == '{"word": "owl"and\n'
