"""Contract tests of the op families: shapes in cases_*.py, truth in reference.py, launches in harness.py."""
