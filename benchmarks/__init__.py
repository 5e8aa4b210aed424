"""Benchmarks: each a module with a command line, each claim in docs/benchmarks.md the output of one."""
