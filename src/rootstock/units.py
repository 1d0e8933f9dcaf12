"""Binary units of sizes."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


def in_units(size_bytes: int) -> str:
    """Formats a number of bytes, such as "1.5 GiB"."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
