"""The measurements of tools/bench_memory.py."""
