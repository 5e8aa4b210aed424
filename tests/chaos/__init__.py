"""Faults of every kind under load, and the check that no client could tell: `python -m tests.chaos`."""
