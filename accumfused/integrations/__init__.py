"""Optional extras for training frameworks.

The package imports none of these modules: each needs its framework.
"""
