"""The small encoder: trained in seconds, the same each time, with heads that do something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.models import encoder, text
from headwise.models.recorded import AttentionCall, RecordedRun

pytestmark = pytest.mark.slow  # an encoder is trained

WHOLE = " ".join(text.read_opening_paragraphs())


@pytest.fixture(scope="module")
def reading() -> RecordedRun:
    return encoder.train_and_record_run(WHOLE)


def weights(call: AttentionCall) -> Tensor:
    """What each head attends to in the whole text, which has no padding."""
    p = call.projections
    q, k, _ = F.linear(call.x[0], p.in_proj_weight, p.in_proj_bias).chunk(3, -1)
    q, k = (x.unflatten(-1, (encoder.NUM_HEADS, -1)).transpose(0, 1) for x in (q, k))
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)


def test_heads_of_the_first_layer_look_at_both_neighbours(reading: RecordedRun) -> None:
    first = weights(reading.calls[0])
    # Even attention would give 1/256.
    assert first.diagonal(-1, 1, 2).mean(-1).max() > 0.4
    assert first.diagonal(1, 1, 2).mean(-1).max() > 0.4


def test_what_was_read(reading: RecordedRun) -> None:
    assert "".join(reading.tokens) == WHOLE[: encoder.LENGTH]
    assert reading.real.sum(-1).tolist() == [
        encoder.LENGTH,
        encoder.SHORTER,
    ]
    assert len(reading.calls) == encoder.NUM_LAYERS


def test_it_can_be_trained_with_the_drop_in_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "STEPS", 20)
    steps: list[tuple[str, int, int]] = []
    seen: list[type] = []

    class Watched(MultiheadAttention):
        def forward(self, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
            seen.append(type(self))
            return super().forward(*args, **kwargs)  # type: ignore[arg-type]

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    first = encoder.train_and_record_run(
        WHOLE, attention=Watched, progress=lambda *step: steps.append(step)
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert seen == [Watched] * (20 * encoder.NUM_LAYERS)
    assert steps[-1][1:] == (20, 20)
    # The training is the same with torch's layer, but for rounding: gradients are right.
    second = encoder.train_and_record_run(WHOLE, attention=nn.MultiheadAttention)
    for ours, theirs in zip(first.calls, second.calls, strict=True):
        torch.testing.assert_close(ours.output, theirs.output, atol=2e-2, rtol=0)
