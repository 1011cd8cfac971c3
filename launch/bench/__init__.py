"""Benchmarks, run as `python launch/bench COMMAND`. Each command is a module here; `shared/` holds what several of them use."""
