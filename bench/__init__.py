"""Microbenchmarks: `python -m bench --help`. Nothing here is a test, and no test asserts a time."""
