"""Entry point of `rootstock` and `python -m rootstock`. Handles Ctrl-C before half a second of imports."""

from __future__ import annotations

from rootstock.interrupts import AT_ONCE, ctrl_c


def main() -> None:
    with ctrl_c(AT_ONCE):
        from rootstock.cli.main import main as run_command

        run_command()


if __name__ == "__main__":
    main()
