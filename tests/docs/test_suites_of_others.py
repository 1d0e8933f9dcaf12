"""docs/clients.md tells of each suite of another project how many cases pass, and why the others do not.

`bench/show/suites/known_cases.py` has the reasons, each with its number of cases in the last run of J4.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHOW = ROOT / "bench" / "show"
KNOWN_CASES = runpy.run_path(str(SHOW / "suites" / "known_cases.py"))
KNOWN: dict[str, Any] = KNOWN_CASES["KNOWN"]
# The first words of each row, and of each column.
SUITES = {
    "Open Responses": "openresponses",
    "llmprobe": "llmprobe",
    "vLLM": "vllm",
    "llama.cpp": "llama.cpp",
    "SGLang's gateway": "smg",
}
CASES, PASSED, SKIPPED = "cases", "passed", "skipped by the suite"
KINDS = {
    "not implemented": KNOWN_CASES["NOT_IMPLEMENTED"],
    "by design": KNOWN_CASES["DESIGN"],
    "not applicable": KNOWN_CASES["OWN"],
    "the script's text": KNOWN_CASES["MODEL"],
    "the suite's fault": KNOWN_CASES["FAULT"],
}
# Of the list below the table, whose items have other first words than the columns.
ITEMS = {"Not implemented", "By design", "Not applicable", "The script's text", "Faults"}


def section() -> str:
    text = (ROOT / "docs" / "clients.md").read_text()
    [found] = re.findall(r"^## Suites of other projects\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return str(found)


def table() -> list[dict[str, str]]:
    """Returns the cells of each row by the heads of their columns."""
    head, rule, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section().splitlines()
        if line.startswith("|")
    )
    assert all(re.fullmatch("-+:?", cell) for cell in rule)
    return [dict(zip(head, row, strict=True)) for row in rows]


def figures(row: dict[str, str]) -> dict[str, int]:
    """Returns the numbers of a row; an empty cell is left out."""
    return {head: int(cell) for head, cell in row.items() if head != "suite" and cell}


def suite_of(row: dict[str, str]) -> str:
    [found] = [suite for words, suite in SUITES.items() if row["suite"].startswith(words)]
    return found


ROWS = pytest.mark.parametrize("row", table(), ids=suite_of)


def test_the_page_and_the_reasons_are_of_the_same_suites() -> None:
    assert [suite_of(row) for row in table()] == list(KNOWN) == list(SUITES.values())


def test_the_columns_are_the_kinds_of_reasons() -> None:
    assert [*table()[0]] == ["suite", CASES, PASSED, SKIPPED, *KINDS]
    assert {one.kind for reasons in KNOWN.values() for one in reasons} == set(KINDS.values())


@ROWS
def test_the_columns_of_a_row_add_up_to_its_cases(row: dict[str, str]) -> None:
    found = figures(row)
    assert found.pop(CASES) == sum(found.values())


@ROWS
def test_each_figure_is_the_number_of_cases_with_a_reason_of_its_kind(row: dict[str, str]) -> None:
    expected = Counter[str]()
    for one in KNOWN[suite_of(row)]:
        assert one.cases >= 1, f"no case has the reason: {one.why}"
        expected[one.kind] += one.cases
    assert {KINDS[head]: number for head, number in figures(row).items() if head in KINDS} == expected


def test_figures_of_the_list_add_up_to_those_of_the_table() -> None:
    totals = Counter[str]()
    for row in table():
        totals.update(figures(row))
    items = dict(re.findall(r"^- (.*?): (.*?)(?=^- |^$)", section(), re.MULTILINE | re.DOTALL))
    assert set(items) == ITEMS
    for item, text in items.items():
        numbers = [int(number) for number in re.findall(r"\((\d+)[,)]", text)]
        column = "the suite's fault" if item == "Faults" else item[0].lower() + item[1:]
        assert not numbers or sum(numbers) == totals[column], item


def test_the_versions_on_the_page_are_those_that_are_run() -> None:
    run = re.findall(
        r"\"(vllm|llama-cpp-python|llmprobe)(?:==|@)([\d.]+)\"", (SHOW / "j4_suites.py").read_text()
    )
    assert len(run) == 3
    rows = " ".join(row["suite"].lower() for row in table())
    for package, version in run:
        [stated] = re.findall(rf"{package} ([\d.]*\d)", rows)
        assert f"{version}.".startswith(f"{stated}."), package
