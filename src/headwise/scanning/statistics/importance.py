"""Definitions of the measures of head importance.

Their summaries come from runs of the model: a sum over sequences, and the number of sequences. They
are merged and saved like those of all other statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.statistics.statistic import (
    MEAN,
    Definition,
    Parts,
    Statistic,
    Summary,
    SummaryPart,
)

LOSS = "that of the loss; nats a token for the default loss"
ALL = "nothing; what the loss leaves out has no part in it"
PADDING = "padded queries have no part in what the head gives instead"
ABLATION = "mean over sequences x of L(x; head h off) − L(x); off: its outputs are "
WANG = "Wang et al. 2022, arXiv:2211.00593"


class Importance(Statistic):
    """The mean over sequences of a number for each head, from runs of the model."""

    parts: ClassVar[Parts] = MEAN

    def __init__(self, **words: Any) -> None:
        self.definition = Definition(**words)


class _NormalisedOverHeads(Importance):
    """A measure divided by its norm over the heads of the layer, so that layers can be compared."""

    def result(self, summary: Summary) -> Tensor:
        """Return (heads,): the mean over sequences, with norm 1 over the heads."""
        mean = super().result(summary)
        length = torch.linalg.vector_norm(mean)
        return torch.where(length == 0, mean, mean / length)


class _AblationByMeans(Importance):
    """An ablation by means; only ablations by equal means can be merged."""

    parts: ClassVar[Parts] = {**MEAN, "stood_in": SummaryPart(axes=("value_dim",))}

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Add the sums of ablations by equal means.

        Raises:
            OptionError: the means differ.
        """
        first, *others = summaries
        stood_in = first["stood_in"]
        if not all(torch.equal(stood_in, other["stood_in"]) for other in others):
            raise OptionError(
                saw="ablations by different mean outputs",
                needed="one mean over all of the data, for all parts",
                do="means = mean_outputs(model, all_inputs), and ablations(..., by=means) of parts",
            )
        sums = [{n: t for n, t in summary.items() if n != "stood_in"} for summary in summaries]
        return {**super().merge(sums), "stood_in": stood_in.clone()}


GRADIENTS: tuple[Importance, ...] = (
    Importance(
        name="gate_gradient",
        id="gate_gradient-1",
        formula="mean over sequences x of |Σᵢ ⟨O[i], ∂L(x)/∂O[i]⟩| for the head's outputs O[i] of "
        "queries i: |∂L(x)/∂g| for a gate g = 1 on them; queries may cancel, sequences may not",
        unit=LOSS,
        excluded=ALL,
        source="Michel et al. 2019, arXiv:1905.10650, section 4.1",
    ),
    _NormalisedOverHeads(
        name="gate_gradient_normalised",
        id="gate_gradient_normalised-1",
        formula="gate_gradient / √(Σ of its squares over the heads of the layer); 0 in a layer "
        "where all are 0",
        unit="share, 0 to 1; the squares of a layer sum to 1",
        excluded=ALL,
        source="Michel et al. 2019, arXiv:1905.10650, section 4.1, after Molchanov et al. 2017, "
        "arXiv:1611.06440, section 2.2",
    ),
    Importance(
        name="taylor",
        id="taylor-1",
        formula="mean over sequences x of Σᵢ |⟨O[i], ∂L(x)/∂O[i]⟩| for the head's outputs O[i] of "
        "queries i; never below gate_gradient",
        unit=LOSS,
        excluded=ALL,
        source="Molchanov et al. 2017, arXiv:1611.06440, section 2.2, and 2019, arXiv:1906.10771; "
        "here with a query as the unit that is removed",
    ),
)
ABLATIONS: dict[str, Importance] = {
    "zero": Importance(
        name="ablation_zero",
        id="ablation_zero-1",
        formula=ABLATION + "0",
        unit=LOSS,
        excluded="nothing",
        source="Michel et al. 2019, arXiv:1905.10650, section 3",
    ),
    "mean": _AblationByMeans(
        name="ablation_mean",
        id="ablation_mean-1",
        formula=ABLATION + "their mean over all real positions of the data",
        unit=LOSS,
        excluded=PADDING,
        source=WANG + ", section 3 (which takes the mean at each position of a template)",
    ),
    "resample": Importance(
        name="ablation_resample",
        id="ablation_resample-1",
        formula=ABLATION + "those of another sequence of the same batch, drawn by the seed: the "
        "i-th real query takes those of the other's real query i modulo their number",
        unit=LOSS,
        excluded=PADDING,
        source="Chan et al. 2022, Causal Scrubbing; " + WANG,
    ),
}
STATISTICS: tuple[Importance, ...] = (*GRADIENTS, *ABLATIONS.values())
