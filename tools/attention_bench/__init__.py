"""The parts of bench_attention.py: problem → sent, ranks → measure → report."""
