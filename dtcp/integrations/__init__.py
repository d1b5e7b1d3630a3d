"""Other libraries' models with the attention of this one. Nothing here is imported by ``import dtcp``."""
