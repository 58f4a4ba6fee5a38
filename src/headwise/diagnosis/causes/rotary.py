"""Causes in the rotation of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.gaps import WHOLE, all_heads_agree_within_rounding
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.errors import OptionError
from headwise.function.rotary import frequencies_of_rule, rotate_by_angles
from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YarnScaling
from headwise.function.spec import Pairing, RotaryRule


class RotaryThetaCause(Cause):
    """The rotary frequencies have another base.

    Pair i of a head turns by position * theta ** (-2i / width). Theta is 10,000 in Llama 2 and
    500,000 in Llama 3. Code that finds no `rope_theta` often takes 10,000 silently; transformers 5
    moved it into `rope_parameters`.

    Wrong:
        Rotary(theta=getattr(config, "rope_theta", 10_000.0))

    Right:
        Rotary(theta=config.rope_parameters["rope_theta"])

    Repair:
        `Rotary(theta=...)` with the number of the config.

    Confused with:
        rotary exponent width: another exponent is another theta.
        rotary scaling kind: NTK scaling is another theta.
        rotary missing: at position 0 all agree.
    """

    name: ClassVar[str] = "rotary theta"
    symptom: ClassVar[str] = "Short prompts are fine and long ones degrade: wrong rope_theta"
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all bases from 10 to 10 million."""
        rotary = evidence.model.settings.rotation
        if rotary is None:
            return
        right = rotary.theta

        def make(theta: float) -> Variant:
            model = evidence.model.with_rotary(theta=theta)
            return Variant(model, {"theta": theta}, f"Rotary(theta={right:g})")

        yield Family(make, tuple(10.0 ** (n / 4) for n in range(4, 32)), is_log=True)


PAIRINGS: tuple[Pairing, ...] = ("half-split", "interleaved")
THETAS = (1e3, 1e4, 1e5, 1e6)  # from which the fit of a base starts


class RotaryMissingCause(Cause):
    """Queries and keys are not rotated, or are rotated where they should not be.

    At position 0 the angles are 0, so the first token cannot show it.

    Repair:
        Rotate q and k before the scores: `rotary=Rotary(...)`. Keep the rotated keys in the cache,
        not the others.

    Confused with:
        rotary theta: a very large theta turns only the first channels.
        rotary axis: with one head, rotation by the head's number is none.
    """

    name: ClassVar[str] = "rotary missing"
    symptom: ClassVar[str] = (
        "The first token is right and all others are wrong: RoPE is not applied"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without its rotation; where it has none, rotations of all bases."""
        if evidence.model.settings.rotation is not None:
            model = evidence.model.with_settings(rotary=None)
            yield Variant(model, {}, "rotate q and k: Rotary(...)")
            return
        for pairing in PAIRINGS:
            yield Family(partial(_add_rotation, evidence.model, pairing), THETAS, is_log=True)


def _add_rotation(model: AttentionModel, pairing: Pairing, theta: float) -> Variant:
    """Return the model with a rotation of all channels."""
    width = model.weights["wq"].shape[1] // 2 * 2
    rotary = RotaryRule(theta, width, pairing, scaling=None)
    parameters = {"rotary": pairing, "theta": theta}
    return Variant(model.with_settings(rotary=rotary), parameters, "leave out the rotation")


class RotaryPairingCause(Cause):
    """Other channels turn together: i with i + width / 2, or 2i with 2i + 1.

    Hugging Face's Llama, GPT-NeoX and Qwen turn i with i + width / 2 (half-split, `rotate_half`).
    Meta's Llama, GPT-J, Cohere and GLM turn 2i with 2i + 1 (interleaved). The names and shapes of
    the weights are the same. Text is fluent and wrong.

    Wrong:
        a, b = x[..., : width // 2], x[..., width // 2 :]  # GPT-J

    Right:
        a, b = x[..., 0::2], x[..., 1::2]

    Repair:
        Set the pairing that is reported, or permute the rows once: `headwise convert MODEL OUT --to
        llama`.

    Confused with:
        rotary permutation missing: the same outputs, by rows of weights in place of code.
        rotary missing: at position 0 the three agree.
    """

    name: ClassVar[str] = "rotary pairing"
    symptom: ClassVar[str] = (
        "GPT-J or Meta weights give other outputs in a Hugging Face Llama: interleaved RoPE"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other convention."""
        rotary = evidence.model.settings.rotation
        if rotary is None:
            return
        other: Pairing = "interleaved" if rotary.pairing == "half-split" else "half-split"
        model = evidence.model.with_rotary(pairing=other, span=None)
        yield Variant(model, {"pairing": other}, f'Rotary(pairing="{rotary.pairing}")')


class RotaryPartialWidthCause(Cause):
    """Another number of channels of a head turns.

    GPT-NeoX turns a quarter of each head, Phi and GLM a half. The config has `rotary_pct`,
    `rotary_dim` or `partial_rotary_factor`.

    Wrong:
        q = rotate(q)

    Right:
        q = torch.cat([rotate(q[..., :width]), q[..., width:]], -1)

    Repair:
        `Rotary(width=...)` with the number of channels that is reported.

    Confused with:
        rotary pairs across the whole head: if the pairs of few channels matter.
        rotary exponent width: frequencies often follow the width.
    """

    name: ClassVar[str] = "rotary partial width"
    symptom: ClassVar[str] = (
        "Outputs agree at the first token and drift with the position: wrong partial_rotary_factor"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return every even width, with frequencies that follow it and with the right ones."""
        rotary = evidence.model.settings.rotation
        if rotary is None:
            return
        head_dim = evidence.model.weights["wq"].shape[1]
        for width in range(2, head_dim + 1, 2):
            if width != rotary.width:
                bases = {None, rotary.exponent_width or rotary.width}
                for base in sorted(bases, key=str):
                    model = evidence.model.with_rotary(width=width, exponent_width=base)
                    yield Variant(model, {"width": width}, f"Rotary(width={rotary.width})")


class RotaryWholeHeadPairsCause(Cause):
    """Channel i of a partial rotation turns with i + head_dim / 2 in place of i + width / 2.

    Wrong:
        a, b = x[..., : width // 2], x[..., head_dim // 2 : head_dim // 2 + width // 2]

    Right:
        a, b = x[..., : width // 2], x[..., width // 2 : width]

    Repair:
        Rotate the first `width` channels as if they were a head.

    Confused with:
        rotary partial width: for the first half of the pairs alone.
        rotary pairing: with one pair of channels.
    """

    name: ClassVar[str] = "rotary pairs across the whole head"
    symptom: ClassVar[str] = (
        "Partial RoPE with the right rotary_dim and theta differs: pairs across the whole head"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return pairs that are half a head apart."""
        rotary = evidence.model.settings.rotation
        head_dim = evidence.model.weights["wq"].shape[1]
        if rotary is None or rotary.width == head_dim:
            return
        model = evidence.model.with_rotary(pairing="half-split", span=head_dim // 2)
        yield Variant(
            model, {"span": head_dim // 2}, f"pair channel i with i + {rotary.width // 2}"
        )


class RotaryExponentWidthCause(Cause):
    """Frequencies are theta ** (-2i / n) with another n, such as head_dim for the rotated width.

    With partial rotation, n is the rotated width in GPT-NeoX, GPT-J, Phi and GLM. Code that was
    written for a whole rotation has head_dim there.

    Wrong:
        theta ** (-torch.arange(0, width, 2) / head_dim)

    Right:
        theta ** (-torch.arange(0, width, 2) / width)

    Repair:
        Divide by the number that is reported.

    Confused with:
        rotary theta: always. Another n has the frequencies of theta ** (width / n). The result
            names both.
        rotary partial width: for the pairs that both turn.
    """

    name: ClassVar[str] = "rotary exponent width"
    symptom: ClassVar[str] = (
        "Partial RoPE agrees at position 0 and drifts, with the right theta and rotary_dim"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return every even n up to twice head_dim."""
        rotary = evidence.model.settings.rotation
        if rotary is None or rotary.width < 4:
            return
        head_dim = evidence.model.weights["wq"].shape[1]
        right = rotary.exponent_width or rotary.width
        for base in range(4, 2 * head_dim + 1, 2):
            if base != right:
                model = evidence.model.with_rotary(exponent_width=base)
                yield Variant(model, {"exponent width": base}, f"theta ** (-2i / {right})")


MOST = 64
OFFSETS = tuple(offset for offset in range(-MOST, MOST + 1) if offset)


class RotaryPositionOffsetCause(Cause):
    """Positions of queries and keys are off by a constant.

    Scores depend on the difference of two positions. A constant offset of both is therefore the
    same function. `compare` names it where q alone or k alone is off, or says "same function, other
    weights".

    Wrong:
        positions = torch.arange(1, length + 1)

    Right:
        positions = torch.arange(length)

    Repair:
        Start positions at the number of the original.

    Confused with:
        position offset in decoding: if the first call is right.
        rotary axis: with one token.
    """

    name: ClassVar[str] = "rotary position offset"
    symptom: ClassVar[str] = (
        "RoPE positions start at 1, or at the length of the padding, and q and k differ"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return offsets of up to MOST tokens of queries and of keys, not the same for both."""
        parted = [stage[0] for stage in self.stages if evidence.parted_calls_and_heads(stage)]
        if evidence.model.settings.rotation is None or _has_equal_offsets(evidence):
            return
        for role in parted or ("q", "k"):
            for offset in OFFSETS:
                model = evidence.model.with_rotary(**{f"{role}_offset": offset})
                repair = f"positions that are {abs(offset)} {'smaller' if offset > 0 else 'larger'}"
                yield Variant(model, {"role": role, "offset": offset}, repair)


def _has_equal_offsets(evidence: Evidence) -> bool:
    """True if queries and keys are off by the same number, which changes no score."""
    stages = ("q after rotary", "k after rotary")
    if not all(evidence.parted_calls_and_heads(stage) for stage in stages):
        return False
    call = min(evidence.calls, key=lambda call: call.inputs.x.shape[1])
    models = (evidence.model.with_rotary(q_offset=n, k_offset=n) for n in OFFSETS)
    return any(
        all(all_heads_agree_within_rounding(model, call, stage, [WHOLE]) for stage in stages)
        for model in models
    )


class RotaryAxisCause(Cause):
    """Angles grow with the head, the batch or the reversed position in place of the position.

    Rotary code takes the axis of length from the shape. After the transpose to (batch, heads,
    length, d) it is axis 2, and before it axis 1.

    Wrong:
        positions = torch.arange(q.shape[1])  # of (batch, heads, length, d)

    Right:
        positions = torch.arange(q.shape[2])

    Repair:
        Rotate by the position of the token.

    Confused with:
        rotary missing: with one head, or one sequence, the angles are all 0.
        rotary position offset: with one token.
    """

    name: ClassVar[str] = "rotary axis"
    symptom: ClassVar[str] = (
        "RoPE is right with one head and wrong with several: it rotates by the head's number"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return angles by head, by position and head, by batch, and by position from the end."""
        rotary = evidence.model.settings.rotation
        if rotary is None:
            return
        for axis in ("head", "position and head", "batch", "position from the end"):
            model = evidence.model
            for stage in self.stages:
                model = model.with_stage_function(stage, partial(_rotate_by_axis, axis))
            yield Variant(model, {"axis": axis}, "rotate by the position of the token: axis 2 of 4")


def _rotate_by_axis(axis: str, forced: ForcedStage) -> Tensor:
    role, rotary = forced.stage[0], forced.settings.rotation
    x = forced[f"{role} after norm"]
    if rotary is None:  # another cause removed the rotation
        return x
    positions = forced.call.query_positions if role == "q" else forced.call.new_key_positions
    places = _positions_along_axis(axis, x, positions[:, None])
    angles = places[..., None].double() * frequencies_of_rule(rotary)
    return rotate_by_angles(rotary, x, angles)


def _positions_along_axis(axis: str, x: Tensor, positions: Tensor) -> Tensor:
    heads = torch.arange(x.shape[1])[:, None]
    match axis:
        case "head":
            return heads
        case "position and head":
            return positions + heads
        case "batch":
            return torch.arange(len(x))[:, None, None]
        case _:
            return positions.flip(-1)


class RotarySomeHeadsCause(Cause):
    """Only a share of the heads is rotated.

    Code that takes an index for a slice rotates head 0 alone.

    Wrong:
        q[:, 0] = rotate(q[:, 0])

    Right:
        q = rotate(q)

    Repair:
        Rotate every head.

    Confused with:
        rotary missing: with one head.
    """

    name: ClassVar[str] = "rotary on some heads only"
    symptom: ClassVar[str] = (
        "Some heads are right and the others ignore positions: RoPE on a part of the heads"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.3

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without a rotation of the heads that part."""
        if evidence.model.settings.rotation is None:
            return
        model, heads = evidence.model, {}
        for stage in self.stages:
            parted = sorted({head for _, _, head in evidence.parted_calls_and_heads(stage)})
            count = evidence.model.weights[f"w{stage[0]}"].shape[0]
            if len(parted) == count or WHOLE in parted:
                return
            heads[stage[0]] = tuple(head for head in range(count) if head not in parted)
            model = model.with_stage_function(stage, partial(_undo_rotation_of_heads, parted))
        rotated, details = {"rotated": heads["q"]}, {"rotated kv heads": heads["k"]}
        yield Variant(model, rotated, "rotate every head", details)


def _undo_rotation_of_heads(heads: list[int], forced: ForcedStage) -> Tensor:
    x, bare = forced.usual_result().clone(), forced[f"{forced.stage[0]} after norm"]
    x[:, heads] = bare[:, heads]
    return x


class RotaryDtypeCause(Cause):
    """The frequencies of the rotation are rounded to a narrower dtype.

    `model.bfloat16()` and `model.to(torch.bfloat16)` also round the buffer `inv_freq`, which
    `from_pretrained(..., dtype=torch.bfloat16)` keeps in float32. An error of a frequency grows
    with the position.

    Wrong:
        model = AutoModel.from_pretrained(folder).to(torch.bfloat16)

    Right:
        model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)

    Repair:
        Load the model in its dtype. `inv_freq.float()` afterwards does not bring the digits back.

    Confused with:
        dtype's rounding of weights: a cast rounds both.
    """

    name: ClassVar[str] = "rotary dtype"
    symptom: ClassVar[str] = (
        "model.to(torch.bfloat16) differs from a model loaded in bfloat16, more at later tokens"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the frequencies rounded to each 16-bit dtype."""
        if evidence.model.settings.rotation is None:
            return
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            repair = "keep inv_freq in float32: load with dtype=..., without .to(dtype) afterwards"
            yield Variant(evidence.model.with_rotary(dtype=dtype), {"dtype": name}, repair)


FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0)
LENGTHS = (32, 2048, 4096, 8192, 32768)


class RotaryScalingKindCause(Cause):
    """The frequencies are scaled by another formula, or not at all.

    Linear scaling divides all frequencies. NTK scaling changes theta. Llama 3 and YaRN divide low
    frequencies alone. Code that does not know a `rope_type` often ignores it.

    Wrong:
        Rotary(theta=500_000.0)

    Right:
        Rotary(theta=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))

    Repair:
        Take the scaling that is reported.

    Confused with:
        rotary theta: NTK scaling is another theta.
        rotary scaling factor: with a factor of 1, all kinds are equal.
    """

    name: ClassVar[str] = "rotary scaling kind"
    symptom: ClassVar[str] = (
        "Long prompts degrade although theta and factor are right: rope_scaling of another type"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 1.05

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return no scaling, and the other formulas with this factor or a usual one."""
        rotary = evidence.model.settings.rotation
        if rotary is None:
            return
        length = getattr(rotary.scaling, "original_length", None)
        factors = FACTORS if rotary.scaling is None else (rotary.scaling.factor, *FACTORS)
        for scaling in _list_other_scalings(
            rotary, factors, LENGTHS if length is None else (length,)
        ):
            for amplitude in (None, rotary.amplitude, 1.0):
                model = evidence.model.with_rotary(scaling=scaling, attention_factor=amplitude)
                kind = "none" if scaling is None else type(scaling).__name__
                details = {} if scaling is None else {"factor": scaling.factor}
                yield Variant(model, {"scaling": kind}, f"scaling={rotary.scaling}", details)


def _list_other_scalings(
    rotary: RotaryRule, factors: Sequence[float], lengths: Sequence[int]
) -> Iterator[Scaling | None]:
    """Return the scalings of other kinds that have frequencies for this rotation."""
    made: list[Scaling | None] = [None]
    for factor in factors:
        made += [LinearScaling(factor), NTKScaling(factor)]
        made += [Llama3Scaling(factor, 1.0, 4.0, length) for length in lengths]
        made += [YarnScaling(factor, length) for length in lengths]
    for scaling in made:
        if type(scaling) is not type(rotary.scaling):
            with suppress(OptionError):  # no pair of channels on the ramp
                frequencies_of_rule(replace(rotary, scaling=scaling))
                yield scaling


class RotaryScalingFactorCause(Cause):
    """The frequencies are scaled by another factor.

    `rope_scaling` of the config has a factor, such as 8 for Llama 3.1. Some engines apply it twice,
    or read it from another key.

    Repair:
        Set the `factor` of the config.

    Confused with:
        rotary scaling kind: if all frequencies that matter are scaled alike.
        rotary theta: NTK scaling is another theta.
    """

    name: ClassVar[str] = "rotary scaling factor"
    symptom: ClassVar[str] = "Long prompts degrade, short ones are right: wrong rope_scaling factor"
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 1.06  # a factor of 1 is no scaling: another kind

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return factors, with the attention factor that follows and with the right one."""
        rotary = evidence.model.settings.rotation
        if rotary is None or rotary.scaling is None:
            return
        scaling = rotary.scaling
        for amplitude in (None, rotary.amplitude):

            def make(factor: float, amplitude: float | None = amplitude) -> Variant:
                changed = replace(scaling, factor=factor)
                model = evidence.model.with_rotary(scaling=changed, attention_factor=amplitude)
                return Variant(model, {"factor": factor}, f"scaling={scaling}")

            yield Family(make, tuple(1.25 * 1.6**n for n in range(9)), is_log=True)


class RotaryAttentionFactorCause(Cause):
    """Rotated channels are multiplied by another factor.

    YaRN multiplies the cosines and sines by 0.1 ln(factor) + 1, which makes long contexts sharper.
    Both q and k have the factor, so scores have its square.

    Wrong:
        cos, sin = angles.cos(), angles.sin()

    Right:
        cos, sin = factor * angles.cos(), factor * angles.sin()

    Repair:
        Set the factor that is reported: `YarnScaling(..., attention_factor=...)`.

    Confused with:
        scale: if all channels turn, the square of the factor is a factor of the scores.
    """

    name: ClassVar[str] = "rotary attention factor"
    symptom: ClassVar[str] = (
        "A model with YaRN is too flat or too sharp at every length: wrong attention factor"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all factors."""
        rotary = evidence.model.settings.rotation
        if rotary is None:
            return
        right = rotary.amplitude

        def make(factor: float) -> Variant:
            model = evidence.model.with_rotary(attention_factor=factor)
            return Variant(model, {"attention factor": factor}, f"attention_factor={right:.6g}")

        yield Family(make, (0.25 * right, 0.5 * right, right, 2 * right, 4 * right), is_log=True)
