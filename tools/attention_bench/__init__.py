"""The parts of bench_attention.py: problem → masks → ways, passes, sent → single, ranks → measure → report → tables."""
