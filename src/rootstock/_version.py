"""The version, read by packaging and by `rootstock --version`."""

__version__ = "0.1.0"
