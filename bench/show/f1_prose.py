"""F1: prose in plain words, counted per 1,000 lines of Python, before issue 13 and now.

Counted are, in comments, docstrings, messages and Markdown, without code and quotations:

    nouns       "what", "whatever", "whoever", "nobody", "anybody", "somebody", "everybody", outside questions
    docstrings  that begin with a pronoun, a question word, "so", "as", "if" or "else"
    sentences   that begin with "So", "As" or "Else"

`--list` prints each place that is left.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

from common import ROOT, argument_parser, at_most, conclude

from docs.prose import Finding, findings

BEFORE = "5b652a8"  # the last commit before issue 13
AREAS = {
    "src": ("src/",),
    "docs": ("docs/", "README.md", "CONTRIBUTING.md", "SECURITY.md"),
    "tests": ("tests/",),
    "bench": ("bench/",),
}
BAR = 1.0  # per 1,000 lines


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--before", default=BEFORE, help="a commit")
    parser.add_argument("--list", action="store_true", help="print each place")
    args = parser.parse_args()

    figures: dict[str, float | dict[str, int]] = {}
    for name, files in (("before", files_of_commit(args.before)), ("now", files_of_tree())):
        for area, prefixes in AREAS.items():
            texts = {path: text for path, text in files.items() if path.startswith(prefixes)}
            lines = sum(text.count("\n") for text in texts.values())
            found = [each for path, text in sorted(texts.items()) for each in findings(path, text)]
            figures[f"{area}_{name}"] = round(1000 * len(found) / max(1, lines), 2)
            figures[f"{area}_{name}_by_rule"] = dict(Counter(each.rule for each in found))
            if args.list and name == "now":
                print_findings(found)
    conclude("F1", figures, {f"{area}_now": at_most(BAR) for area in AREAS})


def files_of_commit(commit: str) -> dict[str, str]:
    with archive_of(commit) as files:
        return {
            member.name: (files.extractfile(member) or io.BytesIO()).read().decode()
            for member in files.getmembers()
            if member.isfile() and is_prose(member.name)
        }


def extract(commit: str, folder: Path) -> None:
    """Writes the files of a commit below `folder`."""
    with archive_of(commit) as files:
        files.extractall(folder, filter="data")


def archive_of(commit: str) -> tarfile.TarFile:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    return tarfile.open(fileobj=io.BytesIO(archive))


def files_of_tree() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {
        path: Path(ROOT, path).read_text()
        for path in listed.splitlines()
        if is_prose(path) and Path(ROOT, path).exists()
    }


def is_prose(path: str) -> bool:
    return path.endswith((".py", ".md")) and path != "CHANGELOG.md"


def print_findings(found: list[Finding]) -> None:
    for each in found:
        print(f"{each.path}:{each.line}: {each.rule}: {each.text}")


if __name__ == "__main__":
    main()
