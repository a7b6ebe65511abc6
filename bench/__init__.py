"""Measurements and long trials, outside the package. Each is a script: `python -m bench.NAME --help`."""
