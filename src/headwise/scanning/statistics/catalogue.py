"""The standard set of head statistics, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.statistics import maps, outputs, rows, similarity, statistic
from headwise.support.text import describe_value

LOSS = "that of the loss; nats a token for the default loss"
ALL = "nothing; what the loss leaves out has no part in it"
PADDING = "padded queries have no part in what the head gives instead"
ABLATION = "mean over sequences x of L(x; head h off) − L(x); off: its outputs are "
WANG = "Wang et al. 2022, arXiv:2211.00593"


class Importance(statistic.Statistic):
    """The mean over sequences of a number for each head, from runs of the model."""

    parts: ClassVar[statistic.Parts] = statistic.MEAN

    def __init__(self, **words: Any) -> None:
        name = words["id"].rpartition("-")[0]
        self.definition = statistic.Definition(**{"name": name, "unit": LOSS} | words)


class _NormalisedOverHeads(Importance):
    """A measure divided by its norm over the heads of the layer, so that layers can be compared."""

    def result(self, summary: statistic.Summary) -> Tensor:
        """Return (heads,): the mean over sequences, with norm 1 over the heads."""
        mean = super().result(summary)
        length = torch.linalg.vector_norm(mean)
        return torch.where(length == 0, mean, mean / length)


class _AblationByMeans(Importance):
    """An ablation by means; only ablations by equal means can be merged."""

    parts: ClassVar[statistic.Parts] = {
        **statistic.MEAN,
        "stood_in": statistic.SummaryPart(axes=("value_dim",)),
    }

    def merge(self, summaries: Sequence[statistic.Summary]) -> statistic.Summary:
        stood_in = summaries[0]["stood_in"]
        if not all(torch.equal(stood_in, other["stood_in"]) for other in summaries):
            saw = "ablations by different mean outputs"
            do = "means = mean_outputs(model, all_inputs), and ablations(..., by=means) of parts"
            raise OptionError(saw=saw, needed="one mean over all of the data, for all parts", do=do)
        sums = [{n: t for n, t in summary.items() if n != "stood_in"} for summary in summaries]
        return {**super().merge(sums), "stood_in": stood_in.clone()}


GRADIENTS: tuple[Importance, ...] = (
    Importance(
        id="gate_gradient-1",
        formula="mean over sequences x of |Σᵢ ⟨O[i], ∂L(x)/∂O[i]⟩| for the head's outputs O[i] of "
        "queries i: |∂L(x)/∂g| for a gate g = 1 on them; queries may cancel, sequences may not",
        excluded=ALL,
        source="Michel et al. 2019, arXiv:1905.10650, section 4.1",
    ),
    _NormalisedOverHeads(
        id="gate_gradient_normalised-1",
        formula="gate_gradient / √(Σ of its squares over the heads of the layer); 0 in a layer "
        "where all are 0",
        unit="share, 0 to 1; the squares of a layer sum to 1",
        excluded=ALL,
        source="Michel et al. 2019, arXiv:1905.10650, section 4.1, after Molchanov et al. 2017, "
        "arXiv:1611.06440, section 2.2",
    ),
    Importance(
        id="taylor-1",
        formula="mean over sequences x of Σᵢ |⟨O[i], ∂L(x)/∂O[i]⟩| for the head's outputs O[i] of "
        "queries i; never below gate_gradient",
        excluded=ALL,
        source="Molchanov et al. 2017, arXiv:1611.06440, section 2.2, and 2019, arXiv:1906.10771; "
        "here with a query as the unit that is removed",
    ),
)
ABLATIONS: dict[str, Importance] = {
    "zero": Importance(
        id="ablation_zero-1",
        formula=ABLATION + "0",
        excluded="nothing",
        source="Michel et al. 2019, arXiv:1905.10650, section 3",
    ),
    "mean": _AblationByMeans(
        id="ablation_mean-1",
        formula=ABLATION + "their mean over all real positions of the data",
        excluded=PADDING,
        source=WANG + ", section 3 (which takes the mean at each position of a template)",
    ),
    "resample": Importance(
        id="ablation_resample-1",
        formula=ABLATION + "those of another sequence of the same batch, drawn by the seed: the "
        "i-th real query takes those of the other's real query i modulo their number",
        excluded=PADDING,
        source="Chan et al. 2022, Causal Scrubbing; " + WANG,
    ),
}
IMPORTANCE: tuple[Importance, ...] = (*GRADIENTS, *ABLATIONS.values())


STANDARD: tuple[statistic.TileStatistic, ...] = (
    *rows.SPREAD,
    *rows.ONE_KEY,
    maps.OneKey(),
    maps.MostReceived(),
    rows.PREVIOUS_TOKEN,
    maps.OffsetProfile(),
    *rows.NEAR,
    *rows.REPEATED,
    outputs.Copying(),
    *rows.MARKED,
    *outputs.CONTRIBUTED,
    outputs.EffectiveRank(),
    outputs.OutputCosine(),
    outputs.CKA(),
    outputs.TotalVariation(),
    similarity.HeadDistance(),
    maps.TopKeysOfChosenQueries(),
    maps.Map(),
)
EARLIER: tuple[statistic.Statistic, ...] = (maps.MapOfShares(),)  # in files of earlier versions
# The order of pictures; all other statistics come after these.
PICTURED = tuple(
    """
    effective_keys previous_token induction one_key first_token separator duplicate_token copying
    sink special relative_contribution distance contribution_norm value_weighted logsumexp
    score_range effective_rank relative_entropy entropy maximum participation within_16
    within_64 within_256
    """.split()  # noqa: SIM905 (one name a line would be long)
)
# The statistics that can characterise a head, in the order of the reports.
KNOWN_FOR = tuple(
    """
    previous_token induction duplicate_token one_key first_token separator special sink copying
    effective_keys distance relative_contribution
    """.split()  # noqa: SIM905 (one name a line would be long)
)
LONGEST_NAME = 80  # characters of an unknown name that are compared with the known names


def find_standard_statistics(names: Iterable[str]) -> tuple[statistic.TileStatistic, ...]:
    """Return statistics of the standard set, in the order of the names."""
    by_name, chosen = {each.definition.name: each for each in STANDARD}, tuple(names)
    for name in chosen:
        if name not in by_name:
            do = "choose from these, or pass a Statistic of your own"
            raise unknown_statistic_error(name, by_name, do=do)
    return tuple(by_name[name] for name in chosen)


def unknown_statistic_error(
    name: object, known: Iterable[str], *, do: str, parameter: str = ""
) -> OptionError:
    """Return the error for an unknown name; ``do`` is the advice if no known name is near."""
    known = tuple(known)
    label = f"{{{parameter}}}" if parameter else "statistic"
    if near := get_close_matches(str(name)[:LONGEST_NAME], known, n=1):
        do = f"{label} {near[0]}" if parameter else f"{near[0]!r} is the nearest"
    saw, needed = f"{label} {describe_value(name)}", f"one of {', '.join(known)}"
    return OptionError(saw=saw, needed=needed, do=do, parameter=parameter)
