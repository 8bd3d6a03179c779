"""What each storage format costs in accuracy: `python -m bench.numerics` measures it, and writes a report.

Nothing here is timed: the figures depend on the arithmetic, which is the same on every machine, and on the seeds.
"""
