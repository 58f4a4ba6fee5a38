"""``python -m headwise``."""

from headwise.cli import main

main()
