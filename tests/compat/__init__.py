"""Clients that people use, against a real server: each in an environment of its own, as its users have it."""
