"""Errors of adapters that both runtimes raise and handle themselves."""

from __future__ import annotations


class UnfitModule(Exception):
    """Error: a module that an adapter changes in a way that is not supported. The message continues its name."""


class RowsUnknown(Exception):
    """Error: the rows of a module's input are not those of the call or of the step."""
