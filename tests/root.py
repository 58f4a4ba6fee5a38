"""Where the repository stands."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
