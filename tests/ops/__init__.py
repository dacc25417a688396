"""Contract tests of the op families: cases.py holds the shapes, reference.py the truth, harness.py the launches."""
