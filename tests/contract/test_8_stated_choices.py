"""Clause 8: the choices that docs/contract.md writes out."""

import pytest
import torch
from hypothesis import given

from headwise import MultiheadAttention
from headwise.matrix.operator import AttentionMatrix
from tests.contract.layers import identity_layer, inputs
from tests.honest import hides_a_whole_sequence
from tests.strategies import Problem, problems


@given(problems())
def test_a_sink_is_one_more_outcome(p: Problem) -> None:
    heads = p.shape[1]
    sink = torch.randn(heads, dtype=torch.float64)
    matrix = AttentionMatrix(p.q, p.k, **{**p.kwargs, "sink": sink})
    outcomes = torch.cat([matrix.dense(), 1 - matrix.dense().sum(-1, keepdim=True)], dim=-1)
    share = torch.exp(sink[:, None] - matrix.logsumexp())
    torch.testing.assert_close(outcomes[..., -1], share, atol=1e-12, rtol=1e-9)
    entropy = torch.special.entr(outcomes.clamp(min=0)).sum(-1)
    torch.testing.assert_close(matrix.entropy(), entropy, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_wrong_hint_changes_nothing(need_weights: bool) -> None:
    layer, x = identity_layer(), inputs()
    blocked = torch.rand(x.shape[1], x.shape[1]) > 0.6
    hinted = layer(x, x, x, attn_mask=blocked, is_causal=True, need_weights=need_weights)[0]
    plain = layer(x, x, x, attn_mask=blocked, need_weights=need_weights)[0]
    assert torch.equal(hinted, plain)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_hint_alone_is_refused_on_every_path(training: bool, grad: bool) -> None:
    layer, x = identity_layer().train(training), inputs()
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="Need attn_mask"):
        layer(x, x, x, is_causal=True)


@hides_a_whole_sequence
@pytest.mark.parametrize("slots", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_appended_slots_may_always_be_attended(slots: dict[str, bool]) -> None:
    layer = MultiheadAttention(24, 4, batch_first=True, **slots).double()  # type: ignore[arg-type]
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    blocked = torch.ones(7, 7, dtype=torch.bool)
    _, weights = layer(x, x, x, attn_mask=blocked)
    assert not weights[..., :7].any()
    torch.testing.assert_close(weights[..., 7], torch.ones(3, 7, dtype=torch.float64))


def test_the_layer_has_no_state_beyond_torchs() -> None:
    assert set(MultiheadAttention(24, 4).state_dict()) == {
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    }
