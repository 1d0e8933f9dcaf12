"""Formats of strings in JSON schemas, as regular expressions whose texts every usual reader of the format takes.

llguidance knows these formats, too, but writes the 29th of February in every year, the second 60, and names of any
length: readers refuse them. Here only capital `T` and `Z` stand in times, and numbers have at most nine digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextFormat:
    pattern: str
    most_chars: int | None = None  # where the pattern cannot bound them


def _days() -> str:
    year = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # 0000 is no year in most libraries
    to_30, to_28 = "(0[1-9]|[12][0-9]|30)", "(0[1-9]|1[0-9]|2[0-8])"
    of_century = "(0[48]|[2468][048]|[13579][26])"  # divisible by four, without 00
    leap_year = f"([0-9]{{2}}{of_century}|{of_century}00)"
    common = f"{year}-((0[13578]|1[02])-31|(0[13-9]|1[0-2])-{to_30}|02-{to_28})"
    return f"({common}|{leap_year}-02-29)"


_HOURS_AND_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
_DAY = _days()
_TIME = rf"{_HOURS_AND_MINUTES}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOURS_AND_MINUTES})"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_CLOCK = "([0-9]{1,9}H([0-9]{1,9}M([0-9]{1,9}S)?)?|[0-9]{1,9}M([0-9]{1,9}S)?|[0-9]{1,9}S)"
_CALENDAR = "([0-9]{1,9}Y([0-9]{1,9}M([0-9]{1,9}D)?)?|[0-9]{1,9}M([0-9]{1,9}D)?|[0-9]{1,9}D)"

TEXT_FORMATS: Mapping[str, TextFormat] = {
    "date": TextFormat(_DAY),
    "time": TextFormat(_TIME),
    "date-time": TextFormat(f"{_DAY}T{_TIME}"),
    "duration": TextFormat(f"P({_CALENDAR}(T{_CLOCK})?|T{_CLOCK}|[0-9]{{1,9}}W)"),
    "email": TextFormat(rf"{_ATOM}(\.{_ATOM})*@{_DOMAIN}", most_chars=254),
    "hostname": TextFormat(_DOMAIN, most_chars=253),
}
# Formats of which llguidance writes only texts that readers take.
ENFORCED_BY_COMPILER = frozenset({"ipv4", "ipv6", "unknown", "uri", "uuid"})
