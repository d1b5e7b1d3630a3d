"""Attention over a sequence that is cut over ranks: kernels, merge and comm → strategies → ops → the API."""
