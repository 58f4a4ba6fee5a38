"""Whether a head writes what it reads: the tokens it looks at, in the logits it adds to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.problem import accumulation_dtype
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.parts import MEAN
from headwise.scanning.statistics.statistic import Definition, Summary, TileStatistic
from headwise.scanning.statistics.tile import WeightTile


class Copying(TileStatistic):
    """How far a head raises the tokens it looks at above the others that it could look at."""

    definition = Definition(
        name="copying",
        formula="l[t] = (zᵢ W_O) · U[t], the head's direct part of the logit of t, for the "
        "different tokens t of the keys with any weight; r[t] = max(0, l[t] − mean of l); mean "
        "over queries i of Σₜ w[t] r[t] / Σₜ r[t], w[t] being the weight of i on all keys "
        "that hold t. At most 64 queries of each sequence, evenly spaced",
        unit="share, 0 (raises only others) to 1 (all weight on one token, which alone is raised)",
        excluded="keys whose token is not known or has no row in the unembedding; queries that see "
        "fewer than two different tokens, or raise none; what stands behind the output projection "
        "(its bias, a norm, a factor), and the normalisation before the unembedding",
        source="Olsson et al. 2022, arXiv:2209.11895, copying score: logits centred over the "
        "tokens of the context, cut off at 0, the share of the token attended to (there rescaled "
        "to [−1, 1]); here on any text, and each token attended to counts by its weight",
        title="Copying: raises what it looks at",
        most="raises the tokens it looks at: {} of all that it raises among those it sees",
    )
    needs = ("tokens", "outputs", "out_proj", "unembedding")
    parts = MEAN

    def update(self, gathered: Summary, tile: WeightTile) -> None:  # noqa: ARG002
        tile.keep_samples()

    def finish(self, gathered: Summary, call: CapturedCall) -> Summary:
        """One sequence after the other, each with its own tokens, and one head after the other."""
        samples = call.samples
        for sequence in range(call.matrix.shape[0]):
            tokens, written = _tokens(call, sequence), _written(call, sequence)
            pairs = zip(samples.weights[sequence], written, strict=True)
            found = [tokens.shares(weights, z) for weights, z in pairs]
            share, raises = (torch.stack(part) for part in zip(*found, strict=True))
            counted = samples.counted[sequence] & samples.real[sequence] & raises
            gathered["sum"] += share.masked_fill(~counted, 0.0).sum(1)
            gathered["count"] += counted.sum(1)
        return super().finish(gathered, call)


@dataclass(frozen=True)
class _Tokens:
    """The different tokens of a sequence.

    Attributes:
        known: the keys that hold them.
        kind: which of them each of these keys holds.
        directions: the row of the unembedding of each of them.
    """

    known: Tensor
    kind: Tensor
    directions: Tensor

    def shares(self, weights: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """(samples,) twice: the score of each row of a head, and whether it raises anything."""
        rows = weights[:, self.known].double()
        on_token = rows.new_zeros(len(rows), len(self.directions)).index_add_(1, self.kind, rows)
        unseen = on_token <= 0
        raised = torch.matmul(written, self.directions.mT).double().masked_fill_(unseen, 0.0)
        mean = raised.sum(-1) / (~unseen).sum(-1).clamp(min=1)
        raised = raised.sub_(mean[:, None]).clamp_(min=0.0).masked_fill_(unseen, 0.0)
        total = raised.sum(-1)
        share = torch.linalg.vecdot(on_token, raised) / total.where(total > 0, 1.0)
        # A token alone is not above the mean: total is 0 there too.
        return share, total > 0


def _tokens(call: CapturedCall, sequence: int) -> _Tokens:
    """Those that are known, and that the unembedding has a row for."""
    tokens, outputs = call.tokens, call.outputs
    unembedding = call.unembedding
    assert tokens is not None
    assert outputs is not None
    assert unembedding is not None
    own = tokens[sequence]
    has_row = (own >= 0) & (own < len(unembedding))
    known = (call.real_keys[sequence] & has_row).nonzero().squeeze(1)
    kinds, kind = torch.unique(own[known], return_inverse=True)
    exact = accumulation_dtype(outputs.dtype)
    return _Tokens(known, kind, unembedding[kinds].to(exact))


def _written(call: CapturedCall, sequence: int) -> Tensor:
    """(heads, samples, embed_dim): what each head adds to the residual at the sampled queries."""
    outputs, out_proj = call.outputs, call.out_proj
    assert outputs is not None
    assert out_proj is not None
    exact = accumulation_dtype(outputs.dtype)
    z = outputs[sequence][:, call.samples.places[sequence]].to(exact)
    return torch.bmm(z, out_proj.to(exact))
