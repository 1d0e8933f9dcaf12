"""K5: prose in plain words, counted in the present tree.

Counted are, per 1,000 lines of each area, in comments, docstrings, messages and Markdown without code and quotations:

    nouns       "what", "whatever", "whoever", "nobody", "anybody", "somebody", "everybody", outside questions
    docstrings  that begin with a pronoun, a question word, "so", "as", "if" or "else"
    sentences   that begin with "So", "As" or "Else"

In src alone are counted the places of "that of" and "those of", the places of "told" (without a bar), and the names
of classes that are defined more than once.

`--list` prints each place that is left.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from common import ROOT, argument_parser, at_most, conclude, exactly

from docs.prose import CODE_SPANS, Finding, findings, texts_of

SHOW = "K5"
AREAS = {
    "src": ("src/",),
    "docs": ("docs/", "README.md", "CONTRIBUTING.md", "SECURITY.md"),
    "tests": ("tests/",),
    "bench": ("bench/",),
}
BAR = 1.0  # per 1,000 lines
THAT_OF = re.compile(r"\b(?:that|those)\s+of\b", re.IGNORECASE)
MOST_THAT_OF = 30
TOLD = re.compile(r"\btold\b", re.IGNORECASE)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print each place")
    lists = parser.parse_args().list

    files = files_of_tree()
    figures: dict[str, object] = {}
    places: list[Finding] = []
    for area, prefixes in AREAS.items():
        texts = {path: text for path, text in files.items() if path.startswith(prefixes)}
        lines = sum(text.count("\n") for text in texts.values())
        found = [each for path, text in sorted(texts.items()) for each in findings(path, text)]
        figures[area] = round(1000 * len(found) / max(1, lines), 2)
        figures[f"{area}_by_rule"] = dict(Counter(each.rule for each in found))
        places += found
    source = {path: text for path, text in files.items() if path.startswith(AREAS["src"])}
    for name, pattern in (("that_of", THAT_OF), ("told", TOLD)):
        found = [each for path, text in sorted(source.items()) for each in matches(name, pattern, path, text)]
        figures[name] = len(found)
        places += found
    repeated = repeated_classes(source)
    figures["repeated_classes"] = len(repeated)
    if lists:
        for each in places:
            print(f"{each.path}:{each.line}: {each.rule}: {each.text}")
        for name, where in sorted(repeated.items()):
            print(f"class {name}: {', '.join(where)}")
    bars = {area: at_most(BAR) for area in AREAS}
    conclude(SHOW, figures, bars | {"that_of": at_most(MOST_THAT_OF), "repeated_classes": exactly(0)})


def files_of_tree() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {
        path: Path(ROOT, path).read_text()
        for path in listed.splitlines()
        if is_prose(path) and Path(ROOT, path).exists()
    }


def is_prose(path: str) -> bool:
    return path.endswith((".py", ".md")) and path != "CHANGELOG.md"


def matches(rule: str, pattern: re.Pattern[str], path: str, source: str) -> Iterator[Finding]:
    """Yields the places of a pattern in the comments, docstrings and messages of one file."""
    for text in texts_of(path, source):
        prose = CODE_SPANS.sub("X", text.text)
        for match in pattern.finditer(prose):
            around = prose[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
            yield Finding(path, text.line + prose[: match.start()].count("\n"), rule, around)


def repeated_classes(source: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the names of classes that are defined more than once, each with its places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in sorted(source.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


if __name__ == "__main__":
    main()
