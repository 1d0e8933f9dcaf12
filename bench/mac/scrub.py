"""Texts without personal data: no names of users and hosts, and no paths."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

Scrub = Callable[[str], str]

_PATH = "<path>"
_NAME = "<name>"
_SHORT_PATH = "/private/path"
# A path in quotes may have spaces. Elsewhere a path ends at the first of them.
_QUOTED = re.compile(r"""(["'])((?:~|/)[^"'\n]*)\1""")
_BARE = re.compile(r"""(?<![\w.:/<>~])~?/(?:[^\s/"'<>|:,;()\[\]]+/)+[^\s"'<>|:,;()\[\]]*""")
_LIBRARIES = r"(?:site-packages|dist-packages|lib/python[\d.]+)/.*"
_OURS = r"(?:rootstock|bench/mac)/.*\.py"
_PUBLIC = re.compile(rf".*/({_LIBRARIES}|{_OURS})", re.DOTALL)


def scrubber(private: Iterable[str] = ()) -> Scrub:
    """Returns a function that removes personal data from a text. `private`: further names and paths."""
    paths = {str(Path.home()), tempfile.gettempdir(), *(text for text in private if "/" in text)}
    names = {text for text in private if "/" not in text} | set(_names_of_machine())
    path = _any_of(path.rstrip("/") for path in paths)
    name = _any_of(names)

    def scrub(text: str) -> str:
        text = path.sub(_SHORT_PATH, text)  # the known ones may have spaces
        text = _QUOTED.sub(lambda found: f"{found[1]}{_shortened(found[2])}{found[1]}", text)
        text = _BARE.sub(lambda found: _shortened(found[0]), text)
        return name.sub(_NAME, text)

    return scrub


def _shortened(path: str) -> str:
    """Returns a path below its library's folder, which names nothing private, or no path."""
    public = _PUBLIC.fullmatch(path)
    return public[1] if public else _PATH


def _names_of_machine() -> list[str]:
    names = [Path.home().name]
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        names.append(getpass.getuser())
    with contextlib.suppress(OSError):
        host = socket.gethostname()
        names += [host, host.partition(".")[0]]
    return names


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of whole words, the longest first. A single letter names no person."""
    known = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    words = "|".join(map(re.escape, known)) or r"(?!)"
    return re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
