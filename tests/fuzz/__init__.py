"""A float64 model of any sequence of public calls, for test_fuzz.py: `machine.Machine` makes them and compares."""
