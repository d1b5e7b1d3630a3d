"""The parts of gpu_check.py: sections → problems, solve → kernels, strategies, tiles, memory, ops → report."""
