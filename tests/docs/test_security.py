"""The limits of a request in docs/security.md are those in the code."""

from __future__ import annotations

import re
from pathlib import Path

from rootstock.engine import limits

DOC = Path(__file__).parents[2] / "docs" / "security.md"


def test_the_table_of_limits_holds_every_limit_with_its_value() -> None:
    rows = re.findall(r"^\|.*\| ([\d,.]+) \| `(M\w+)` \|$", DOC.read_text(), re.MULTILINE)
    stated = {name: float(value.replace(",", "")) for value, name in rows}
    assert stated == {
        name: float(value) for name, value in vars(limits).items() if re.match("(MAX|MIN)_", name)
    }
