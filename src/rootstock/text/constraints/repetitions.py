"""Estimates of the size that a pattern or a grammar grows to when it is compiled.

llguidance writes out repetitions of literal text, and terminals within terminals, before its own limits count:
`a{1000000000}`, or thirty terminals of which each holds the next one twice, would not end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rootstock.text.constraints.depths import Depths

_MOST_COUNTED = 10**18  # repetitions of repetitions make numbers that Python does not print
_REPETITION = r"\{\s*(?P<least>\d{1,18})\s*(?:,\s*(?P<most>\d{0,18})\s*)?\}"
# A class, a string or a pattern without its end goes on to the end of the text or line. Otherwise an end that is not
# there would be searched for behind every opening.
_OF_PATTERN = re.compile(rf"(?P<piece>\\.|\[(?:\\.|[^\]\\])*\]?)|{_REPETITION}|.", re.DOTALL)
_OF_LARK = re.compile(
    r"(?P<comment>//[^\n]*)|(?P<string>\"(?:\\.|[^\"\\\n])*\"?)|/(?P<regex>(?:\\.|[^/\\\n])+)/?"
    rf"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|{_REPETITION}|~\s*(?P<from>\d{{1,18}})(?:\s*\.\.\s*(?P<to>\d{{1,18}}))?"
    r"|.",
    re.DOTALL,
)
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]\n]*\])?(?:\.\d+)?[ \t]*:", re.MULTILINE)


def written_out(pattern: str) -> int:
    """Counts the atoms of a regular expression after its repetitions, those within groups included."""
    return _written_out(_OF_PATTERN.finditer(pattern), {})


def largest_written_out(grammar: str) -> int:
    """Counts the atoms of the largest rule of a Lark grammar, with the terminals inside it."""
    bodies = _bodies(grammar)
    sizes: dict[str, int] = {}
    for name in bodies:
        _add_size(name, bodies, sizes)
    return max(sizes.values())


def rule_depth(grammar: str) -> int:
    """Counts the rules and terminals of a Lark grammar that lead to each other, the longest way."""
    bodies = _bodies(grammar)
    depths = Depths[str](lambda name: _names_in(bodies[name]) & bodies.keys())
    return max(map(depths.of, bodies))


def _bodies(grammar: str) -> dict[str, str]:
    """Returns the texts of the rules by name. "" is the text before the first one."""
    rules = list(_RULE.finditer(grammar))
    bodies: dict[str, str] = {"": grammar[: rules[0].start()] if rules else grammar}
    ends = [following.start() for following in rules[1:]] + [len(grammar)]
    for rule, end in zip(rules, ends, strict=False):
        bodies[rule[1]] = bodies.get(rule[1], "") + grammar[rule.end() : end]
    return bodies


def _names_in(body: str) -> set[str]:
    return {atom["name"] for atom in _OF_LARK.finditer(body) if atom["name"]}


def _add_size(first: str, bodies: Mapping[str, str], sizes: dict[str, int]) -> None:
    """Adds the size of a rule after the sizes of the terminals in it, without recursion."""
    waiting, opened = [first], set[str]()
    while waiting:
        name = waiting[-1]
        if name not in sizes and name not in opened:
            opened.add(name)
            inner = _names_in(bodies[name]) & bodies.keys()
            waiting += [each for each in inner if each.isupper() and each not in sizes and each not in opened]
            continue
        waiting.pop()
        if name not in sizes:
            sizes[name] = _written_out(_OF_LARK.finditer(bodies[name]), sizes)


def _written_out(atoms: Iterator[re.Match[str]], sizes: Mapping[str, int]) -> int:
    levels = [0]  # atoms of each open group
    last = 0  # atoms to which a repetition applies
    for atom in atoms:
        named = atom.groupdict()
        times = [int(named[key]) for key in ("least", "most", "from", "to") if named.get(key)]
        if times:
            more = max(1, *times)
            levels[-1] = min(_MOST_COUNTED, levels[-1] + last * (more - 1))
            last = min(_MOST_COUNTED, last * more)
            continue
        if atom[0] == "(":
            levels.append(0)
            continue
        if atom[0] == ")":
            last = levels.pop() if len(levels) > 1 else levels[0]
        elif named.get("comment") is not None or atom[0].isspace():
            continue
        elif named.get("string") is not None:
            last = len(atom[0])
        elif named.get("regex") is not None:
            last = written_out(named["regex"])
        else:
            name = named.get("name") or ""
            last = sizes.get(name, 1) if name.isupper() else 1  # rules are not written out, terminals are
        levels[-1] = min(_MOST_COUNTED, levels[-1] + last)
    return min(_MOST_COUNTED, sum(levels))
