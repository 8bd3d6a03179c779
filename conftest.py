"""The tests of the package and those of the benchmark share their fixtures."""

pytest_plugins = ["harness"]  # tests/harness.py
