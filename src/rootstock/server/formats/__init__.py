"""The wire formats. Each is a package: its schema, the calls that it makes, its answers and its routes."""
