"""What a file of torch that holds more than a state_dict is answered with."""

from pathlib import Path

import pytest
import torch

from headwise.checkpoints.source import open_source
from headwise.errors import CheckpointError


def test_the_part_to_save_is_named_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "nested.pt"
    torch.save({"state_dict": {"x": torch.zeros(3)}}, path)
    with pytest.raises(CheckpointError, match=r"torch\.load\(\.\.\.\)\['state_dict'\]"):
        open_source(path)
