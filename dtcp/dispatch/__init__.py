"""Attention by ``with context_parallel(...)``: which calls are redirected, what they read, and for how long."""
