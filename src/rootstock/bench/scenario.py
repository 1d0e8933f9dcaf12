"""Scenario of the demo: three agents work on one code base, with one system prompt and one list of tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, assert_never

SYSTEM_PROMPT = """\
You are one of several agents that look after the code of a small plant nursery: the shop, the stock list and the
watering plan. You work in a terminal. You see the files of the repository, you can run commands, and you talk to
the maintainer who asked you for help. Several agents work at the same time on the same repository, each on a task
of its own, and none of them can see what the others say.

# How you work

1. Read before you write. Open the file that you are going to change and the tests that belong to it. Look for
   other callers of a function before you change its arguments.
2. Make the smallest change that solves the problem. Do not rename, reorder or reformat what you were not asked to
   touch. A reviewer should see the reason for every line of your patch.
3. Prove it. Run the tests of the module first and the whole suite at the end. If a test fails that failed before
   your change, say so and leave it alone.
4. Keep the maintainer informed in one or two sentences: what you found, what you will do next, and what you need
   to know. Ask only when the answer changes what you do.
5. When you are done, sum up the change in at most three sentences and name the files that you touched.

# What you must not do

- Never delete a file, a branch or a table of the database unless the maintainer asked for exactly that.
- Never print, log or commit a password, a token or a private key. If you find one, report the path only.
- Never change the version of a dependency to make a test pass.
- Never edit generated files. They carry a mark on their first line; change the generator instead.
- Never push. The maintainer reads your patch and pushes it.

# The repository

The package `nursery` has five modules. `nursery/stock.py` holds the stock list: one row for each plant, pot size
and bed, with the number on hand and the number reserved by open orders. `nursery/orders.py` turns a basket into an
order, reserves the plants and writes the invoice. `nursery/watering.py` computes the watering plan of the week
from the weather report, the soil of each bed and the age of the plants. `nursery/labels.py` prints the labels with
the price, the name and the care symbols. `nursery/web.py` is the shop's site. Tests are in `tests`, one file for
each module, and `make test` runs them. Prices are whole cents, dates are ISO 8601, and lengths are millimetres.

# Style

Write plain Python with type hints. Names carry their units: `price_cents`, `height_mm`, `interval_days`. A function
does one thing and fits on a screen. Raise an error that names the value and what would have been right. A comment
says why, never what. Tests read as sentences and use small numbers that can be checked by hand.
"""

Json = dict[str, Any]


def _tool(name: str, description: str, required: tuple[str, ...], **parameters: tuple[str, str]) -> Json:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    each: {"type": kind, "description": text} for each, (kind, text) in parameters.items()
                },
                "required": list(required),
            },
        },
    }


TOOLS: list[Json] = [
    _tool(
        "read_file",
        "Read a text file of the repository and return its lines with their numbers. Reads at most 2000 lines at "
        "once; give a first line to read on from there.",
        ("path",),
        path=("string", "Path of the file, relative to the root of the repository."),
        first_line=("integer", "Number of the first line to return, counted from 1."),
        lines=("integer", "How many lines to return at most."),
    ),
    _tool(
        "edit_file",
        "Replace one piece of text in a file by another. The old text must occur exactly once, with its white "
        "space; give more of the lines around it if it does not.",
        ("path", "old_text", "new_text"),
        path=("string", "Path of the file, relative to the root of the repository."),
        old_text=("string", "The text to replace, exactly as it stands in the file."),
        new_text=("string", "The text to put in its place."),
    ),
    _tool(
        "search",
        "Search all files of the repository for a regular expression and return the matching lines with their "
        "paths and numbers, the most recently changed files first.",
        ("pattern",),
        pattern=("string", "A regular expression in the syntax of Python."),
        folder=("string", "Search only below this folder."),
        context_lines=("integer", "How many lines to show before and after each match."),
    ),
    _tool(
        "run_command",
        "Run a command in a shell at the root of the repository and return its output and its exit status. A "
        "command that runs for longer than its limit is stopped and reported as such.",
        ("command",),
        command=("string", "The command line, as one would type it."),
        limit_seconds=("integer", "After how many seconds to stop the command, 120 unless given."),
    ),
    _tool(
        "run_tests",
        "Run the tests of one module, or all of them, and return the names of those that failed with the last "
        "lines of their output.",
        (),
        module=("string", "The name of a module, such as stock; all modules unless given."),
        stop_at_first_failure=("boolean", "Whether to stop at the first test that fails."),
    ),
    _tool(
        "query_stock",
        "Ask the copy of the stock list for rows. The copy is made every night and can be read only. Returns at "
        "most 200 rows as a table with one line for each row.",
        ("plant",),
        plant=("string", "The botanical or the common name of the plant, or the beginning of it."),
        bed=("integer", "Only the rows of this bed."),
        at_least=("integer", "Only the rows with at least this number on hand."),
    ),
    _tool(
        "weather_report",
        "Return the weather report that the watering plan uses: for each of the coming days the lowest and the "
        "highest temperature, the rain in millimetres and the hours of sun.",
        ("days",),
        days=("integer", "For how many days, from 1 to 10."),
        place=("string", "The name of the station; the nursery's own unless given."),
    ),
    _tool(
        "write_note",
        "Keep a short note for yourself that stays with the task, to be read when the task is taken up again "
        "later. Notes are not shown to the maintainer.",
        ("text",),
        text=("string", "The note, at most 400 characters."),
        replaces=("integer", "The number of an older note that this one replaces."),
    ),
    _tool(
        "ask_maintainer",
        "Ask the maintainer a question and wait for the answer. Use it when two readings of the task lead to "
        "different patches, and offer the answers that you expect.",
        ("question",),
        question=("string", "The question, in one or two sentences."),
        answers=("string", "The answers that you expect, one on each line."),
    ),
]


@dataclass(frozen=True, slots=True)
class UserSays:
    text: str


@dataclass(frozen=True, slots=True)
class ToolAnswers:
    """Result of `tool`, which the agent called with `arguments` at the end of its last answer."""

    tool: str
    arguments: Json
    text: str


Step = UserSays | ToolAnswers  # the message before an agent's answer


@dataclass(frozen=True, slots=True)
class ScriptedAgent:
    name: str
    steps: tuple[Step, ...]


def first_messages() -> list[Json]:
    """Returns the messages that the conversations of all agents begin with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}]


def add_step(messages: list[Json], step: Step) -> None:
    """Appends `step` to a conversation, in OpenAI's format."""
    match step:
        case UserSays(text):
            messages.append({"role": "user", "content": text})
        case ToolAnswers(tool, arguments, text):
            call_id = f"call_{len(messages)}"
            function = {"name": tool, "arguments": json.dumps(arguments)}
            messages[-1]["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case _:
            assert_never(step)


AGENTS: tuple[ScriptedAgent, ...] = (
    ScriptedAgent(
        "bug hunter",
        (
            UserSays(
                "An order for 12 lavender plants went through although only 8 are on hand. Find out why, and mend "
                "it with a test that fails today.",
            ),
            ToolAnswers(
                "search",
                {"pattern": "on_hand|def reserve", "context_lines": 0},
                "nursery/orders.py:41: def reserve(basket, stock):\n"
                "nursery/orders.py:47:     if stock.on_hand(plant) >= wanted:\n"
                "nursery/stock.py:88: def on_hand(self, plant):\n"
                "tests/test_orders.py:19: def test_an_order_reserves_its_plants():\n",
            ),
            ToolAnswers(
                "read_file",
                {"path": "nursery/stock.py", "first_line": 88, "lines": 6},
                "88  def on_hand(self, plant):\n89      rows = self.rows_of(plant)\n"
                "90      return sum(row.number for row in rows)\n91\n"
                "92  def reserved(self, plant):\n93      return sum(row.reserved for row in self.rows_of(plant))\n",
            ),
            UserSays("Right, open orders are not counted. Keep on_hand as it is, the labels use it as well."),
            ToolAnswers(
                "run_tests",
                {"module": "orders"},
                "3 files of tests, 41 passed, 1 failed:\n"
                "tests/test_orders.py::test_an_order_over_what_is_free_is_refused\n"
                "  expected NotEnoughPlants(wanted=12, free=8), got an order\n",
            ),
        ),
    ),
    ScriptedAgent(
        "reviewer",
        (
            UserSays(
                "Review the branch of last night: it changes how the watering plan treats young plants. I care "
                "about wrong results first, about speed second and about style last.",
            ),
            ToolAnswers(
                "run_command",
                {"command": "git diff main -- nursery/watering.py"},
                "diff nursery/watering.py\n-    interval_days = 3 if soil.dries_fast else 5\n"
                "+    interval_days = 3 if soil.dries_fast or plant.age_days < 60 else 5\n"
                "+    if report.rain_mm(day) > 4:\n+        interval_days = interval_days + 1\n",
            ),
            ToolAnswers(
                "weather_report",
                {"days": 4},
                "day         low  high  rain mm  sun h\n2031-04-02    6    15      5.2    3.0\n"
                "2031-04-03    7    17      0.0    8.5\n2031-04-04    9    21      0.0    9.0\n"
                "2031-04-05   11    22      1.4    6.5\n",
            ),
            UserSays(
                "Good catch about the rain on the first day. Is there a test for a plant that is exactly 60 days "
                "old?",
            ),
            ToolAnswers(
                "search",
                {"pattern": "def test_", "folder": "tests/test_watering.py"},
                "tests/test_watering.py:12: def test_sandy_soil_is_watered_every_three_days():\n"
                "tests/test_watering.py:31: def test_rain_moves_the_next_watering_by_a_day():\n"
                "tests/test_watering.py:44: def test_young_plants_are_watered_more_often():\n",
            ),
        ),
    ),
    ScriptedAgent(
        "writer",
        (
            UserSays(
                "Write the page of the manual about labels: how to print them for one bed, and what to do when "
                "the price of a plant has changed since.",
            ),
            ToolAnswers(
                "search",
                {"pattern": "^def ", "folder": "nursery/labels.py", "context_lines": 1},
                "nursery/labels.py\n10  def print_labels(bed, printer, since=None):\n"
                '11      """Prints one label for each plant of a bed; with `since`, for changed prices only."""\n'
                "27  def care_symbols(plant):\n40  def price_text(price_cents):\n",
            ),
            ToolAnswers(
                "query_stock",
                {"plant": "", "at_least": 1},
                "plant                  pot mm  bed  on hand  reserved  price\n"
                "Lavandula angustifolia    110    4        8         3    590\n"
                "Salvia officinalis         90    4       23         0    450\n"
                "Thymus vulgaris            90    5       40        12    390\n",
            ),
            UserSays("Use bed 4 as the example, and mention that the old labels have to come off first."),
            ToolAnswers(
                "run_command",
                {"command": "python -m nursery.labels --bed 4 --dry-run"},
                "docs/manual/labels.md was written, 34 lines.\nThe command of the example printed 31 labels for "
                "bed 4, 2 of them with a new price, and ended with exit status 0.\n",
            ),
        ),
    ),
)
