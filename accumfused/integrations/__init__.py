"""Optional extras for training frameworks.

Each module imports its framework, and nothing here is imported with the package.
"""
