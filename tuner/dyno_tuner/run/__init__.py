"""Whole runs: a tune stage by stage, its budget, a session, `tune verify` and `tune replay`."""
