"""Parts of a function that its outputs show apart: which tokens it mixes, its values, its weights.

One token has all the weight, so its output shows values and output projection alone. A token that
is replaced shows the queries that see it. Where values are known, outputs are linear in the
weights, so that a few tokens show the weights of each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.diagnosis.simulation.attention_model import AttentionModel, visible_keys
from headwise.diagnosis.simulation.gaps import absolute_difference
from headwise.diagnosis.simulation.stage_rounding import allowed_difference
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.diagnosis.subjects.black_box import BlackBox
from headwise.errors import OptionError
from headwise.reference import repeat_kv_heads

TOKENS, BATCH = 6, 8
MOST_WEIGHTS = 5  # tokens whose weights are computed from outputs
SEED = 1
UNIT = 2.0**-8  # of which all entries are multiples, so that their sums are exact in float32


@dataclass(frozen=True, eq=False)
class BlackBoxComparison:
    """A function beside the model that it should equal.

    Attributes:
        function: the function.
        model: the model.
        widths: of tokens and of the source.
        side: of the function, "first" or "second".
        dtype: of the arithmetic, whose rounding is allowed.
    """

    function: BlackBox
    model: AttentionModel
    widths: tuple[int, int]
    side: str
    dtype: torch.dtype

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """A sentence of each probe, without those on which the function fails."""
        sentences: list[str] = []
        with suppress(OptionError):
            sentences += self._compare_visible_keys()
        with suppress(OptionError):
            sentences += self._compare_one_token()
        return tuple(sentences)

    @property
    def _is_cross_attention(self) -> bool:
        return self.widths[0] != self.widths[1]

    def _compare_one_token(self) -> Iterator[str]:
        """Compare the outputs for one key, and then the weights for several."""
        if "sink" in self.model.weights:  # a share of the weight has no value
            return
        source = (
            _draw_token_vectors(BATCH, 1, self.widths[1], SEED + 1)
            if self._is_cross_attention
            else None
        )
        inputs = Inputs(_draw_token_vectors(BATCH, 1, self.widths[0], SEED), source)
        output, predicted, bound = self._run_both_with_bound(inputs)
        if predicted.shape != output.shape:
            yield f"outputs of the {self.side} have another width"
        elif bool((absolute_difference(predicted, output) > bound).any()):
            gap = float((predicted - output).norm() / predicted.norm())
            yield (
                f"with one token, which has all the weight, the outputs differ by {gap:.2g}: look "
                "at values, the output projection and what is around the attention first"
            )
        else:
            yield (
                "with one token, which has all the weight, the outputs agree: values and the "
                "output projection are right, and the scores or the weights differ"
            )
            yield from self._compare_recovered_attention_weights()

    def _compare_visible_keys(self) -> Iterator[str]:
        """Compare the pairs of a query and another token that it sees."""
        if self._is_cross_attention:
            return
        x = _draw_token_vectors(1, TOKENS, self.widths[0], SEED)
        moved = x.repeat(TOKENS, 1, 1)
        places = torch.arange(TOKENS)
        moved[places, places] = _draw_token_vectors(1, TOKENS, self.widths[0], SEED + 1)[0]
        output, predicted, bound = self._run_both_with_bound(Inputs(torch.cat([x, moved])))
        if predicted.shape != output.shape:
            return
        seen, known = (
            ((y[1:] - y[:1]).abs() > 2 * bound.amax()).any(-1).T for y in (output, predicted)
        )  # (queries, keys)
        call = RecordedCall(Inputs(x), {})
        visible = visible_keys(self.model.prepare_stage("scores", call))[0].any(0)
        others = ~torch.eye(TOKENS, dtype=torch.bool)
        if bool((known & others).any()) and not bool((seen & others).any()):
            yield f"each output of the {self.side} depends on its own token alone: it mixes none"
        # A change that rounding would hide in the model says nothing where it is missing.
        elif wrong := (((seen & ~visible) | (known & ~seen)) & others).nonzero().tolist():
            query, key = wrong[0]
            verb = "sees" if seen[query, key] else "does not see"
            more = f", and so for {len(wrong) - 1} more pairs" if len(wrong) > 1 else ""
            yield f"query {query} of the {self.side} {verb} key {key}{more}"

    def _compare_recovered_attention_weights(self) -> Iterator[str]:
        """Compute the weights of each head from outputs, and compare them."""
        weights = self.model.weights
        heads, value_dim, out_dim = weights["wo"].shape
        tokens = min(value_dim - 1, out_dim // heads, MOST_WEIGHTS)
        if tokens < 2 or self._is_cross_attention:
            return
        inputs = Inputs(_draw_token_vectors(BATCH, tokens, self.widths[0], SEED + 2))
        output, _, bound = self._run_both_with_bound(inputs)
        run = self.model.predict_all_stages(RecordedCall(inputs, {}))
        values = repeat_kv_heads(run["v"], heads=heads)
        parts = torch.einsum("bhjd,hdo->bohj", values, weights["wo"]).flatten(2)
        inverse = torch.linalg.pinv(parts)
        rest = output if "bo" not in weights else output - weights["bo"]
        weights_shown, error = (
            torch.einsum("bwo,bqo->bwq", matrix, x).unflatten(1, (heads, tokens)).mT
            for matrix, x in ((inverse, rest), (inverse.abs(), bound))
        )
        apart = ((weights_shown - run["weights"]).abs() > error).flatten(2).any(2).any(0)
        numbers = apart.nonzero().flatten().tolist()
        if numbers:
            nouns = "head" if len(numbers) == 1 else "heads"
            listed = f"{nouns} {', '.join(map(str, numbers))}"
            listed = "all heads" if len(numbers) == heads else listed
            yield f"weights, computed from outputs of {tokens} tokens, differ in {listed}"

    def _run_both_with_bound(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output of the function, that of the model, and what rounding explains."""
        output = self.function.output(inputs)
        forced = self.model.prepare_stage("output", RecordedCall(inputs, {}, self.dtype))
        return output.double(), forced.compute_stage(), allowed_difference(forced)


def _draw_token_vectors(batch: int, tokens: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, width, generator=generator)
    return (x / UNIT).round() * UNIT
