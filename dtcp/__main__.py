"""``python -m dtcp``: the same as the command ``dtcp``."""

from dtcp.cli import main

main()
