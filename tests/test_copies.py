"""Masks, biases and matrices are values: a copy has its own tensors, a pickle has them all."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headwise import AttentionMatrix, Mask, ScoreBias


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_a_copied_bias_has_its_own_tensor(how: Callable[[Any], Any], kind: str) -> None:
    tensor = torch.randn(6) if kind == "alibi" else torch.randn(6, 9)
    bias = getattr(ScoreBias, kind)(tensor, align="top-left")
    sizes = {"batch": 3, "heads": 6, "queries": 24, "keys": 29, "device": torch.device("cpu")}
    expected = bias.bind(**sizes).table
    copied = how(bias)
    tensor.zero_()
    assert torch.equal(copied.bind(**sizes).table, expected)
    assert not torch.equal(bias.bind(**sizes).table, expected)


def test_a_matrix_survives_pickle_with_every_option() -> None:
    q, k, v = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 29, 10), torch.randn(3, 2, 29, 7)
    matrix = AttentionMatrix(
        q,
        k,
        mask=Mask.window(9, 2, align="bottom-right") & Mask.lengths(keys=torch.tensor([29, 0, 7])),
        score_bias=ScoreBias.alibi(torch.rand(6), align="bottom-right"),
        softcap=4.0,
        sink=torch.randn(6),
    )
    again = pickle.loads(pickle.dumps(matrix))
    assert repr(again) == repr(matrix)
    assert torch.equal(again @ v, matrix @ v)
