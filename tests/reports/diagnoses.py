"""Diagnoses for the tests of their page: made-up ones, which have all that can be shown."""

import math
from dataclasses import replace

from headwise.identify.catalogue import ROTARY_PERMUTATION_MISSING, ROTARY_THETA
from headwise.identify.comparison import (
    FoundCause,
    FunctionComparison,
    LayerComparison,
    ModelComparison,
    PartedStage,
    StageGaps,
)
from headwise.identify.results import (
    Diagnosis,
    ModuleMoves,
    OutputComparison,
    TensorComparison,
    TensorEvidence,
    Verdict,
)
from headwise.reports.diagnosis import DiagnosisReport

HEADS, KV_HEADS = 6, 2
SHORT, LONG = "7 <random> tokens", "90 tokens under a causal mask"


def stage_gaps(
    stage: str,
    size: float,
    *,
    probe: str = SHORT,
    heads: int = HEADS,
    call: int = 0,
    by_position: tuple[float, ...] = (),
) -> StageGaps:
    """Differences in head 0 alone; of a size that rounding explains where it is tiny."""
    share = 50.0 if size > 1e-12 else 0.2
    return StageGaps(
        stage=stage,
        probe=probe,
        call=call,
        sizes=(size, *(0.0,) * (heads - 1)),
        shares=(share, *(0.0,) * (heads - 1)),
        by_position=by_position,
    )


def function(heads: int = HEADS) -> FunctionComparison:
    """Two faults: the theta explains q and k, nothing explains the scores."""
    theta = FoundCause(
        name="rotary theta",
        parameters={"theta": 10_000.0},
        stages=("q after rotary", "k after rotary"),
        heads=(0,),
        repair='Rotary(theta=500000, note="<&>")',
        equals=("rotary exponent width",),
        page=ROTARY_THETA.page,
        share=0.625,
        output_left=0.25,
    )
    explained = [
        PartedStage(
            stage=stage,
            size=0.5,
            heads=(0,),
            probes=(LONG,),
            is_explained=True,
            positions=(1, 2),
        )
        for stage in theta.stages
    ]
    left = PartedStage(stage="scores", size=math.inf, heads=None, probes=(SHORT, LONG))
    return FunctionComparison(
        kinds=("headwise.Attention", "a function named <f>"),
        probes=(SHORT, LONG),
        seed=4,
        output_gap=0.375,
        stages=("q after rotary", "k after rotary", "scores", "output"),
        parted=(*explained, left),
        causes=(theta,),
        gaps=(
            stage_gaps("q after rotary", 1e-15, heads=heads),
            stage_gaps(
                "q after rotary", 0.5, probe=LONG, heads=heads, by_position=(0.0, 0.5, 0.25)
            ),
            stage_gaps("k after rotary", 1e-15, heads=KV_HEADS),
            stage_gaps("k after rotary", 3e-5, probe=LONG, heads=KV_HEADS),
            stage_gaps("scores", math.inf, heads=1),
            stage_gaps("scores", 0.02, probe=LONG, heads=heads),
            stage_gaps("output", 0.0, probe=LONG, heads=1),
        ),
    )


def report_of_function() -> DiagnosisReport:
    return DiagnosisReport(
        diagnosis=Diagnosis(verdict=Verdict.DIFFERENT, function=function()),
        first="ported <model>",
        second="original",
        call="headwise compare 'ported <model>' original --layer=3",
    )


def report_of_many_heads(name: str) -> DiagnosisReport:
    diagnosis = Diagnosis(verdict=Verdict.DIFFERENT, function=function(heads=64))
    return DiagnosisReport(diagnosis=diagnosis, first=name, second=name)


def report_of_model() -> DiagnosisReport:
    """Layers 1 and 2 have the causes of `function`, layer 3 has the place of layer 4."""
    same = replace(function(), parted=(), causes=(), gaps=function().gaps[-1:])
    layers = [
        LayerComparison(
            name=f"layers.{n}.attention",
            other_name=f"h.{n}.attn",
            input_gap=0.0,
            has_other_input=n > 1,
            comparison=function() if n in (1, 2, 3) else same,
            exchanged_with="h.4.attn" if n == 3 else "",
        )
        for n in range(4)
    ]
    model = ModelComparison(
        kinds=("Ported", "Original"),
        inputs="2 x 24 random tokens",
        seed=3,
        layers=tuple(layers),
        output_gap=0.4,
        has_other_output=True,
    )
    return DiagnosisReport(diagnosis=Diagnosis(verdict=Verdict.DIFFERENT, model=model))


def report_of_weights() -> DiagnosisReport:
    numbers = {"entries": 9216, "differing": 4608, "apart": 4608, "largest": 0.25}
    tensors = TensorComparison(
        same=27,
        differences=(
            TensorEvidence(
                name="model.layers.1.self_attn.q_proj.weight_of_a_name_without_any_place_to_break",
                made_of=("layers.1.attention.wq.weight",),
                kind="entries",
                numbers=numbers,
                where="queries of heads 0 to 3",
            ),
        ),
        only_second=("<rotary>.inv_freq",),
    )
    moves = (
        ModuleMoves(
            name="model.layers.1.self_attn",
            layer=1,
            moves=("rotary permutation missing (q and k)",),
            causes=("rotary permutation missing",),
            repairs=("undo it in <wq>, wk",),
            pages=(ROTARY_PERMUTATION_MISSING.page,),
            unexplained=("v",),
        ),
        ModuleMoves(
            name="", layer=None, moves=("phlogiston (q)",), causes=("phlogiston",), pages=("",)
        ),
    )
    outputs = (
        OutputComparison(first="layers.0", second="layers.0", apart=1e-16, allowed=1e-15),
        OutputComparison(first="layers.1", second="layers.1", apart=0.5, allowed=1e-15),
    )
    return DiagnosisReport(
        diagnosis=Diagnosis(
            verdict=Verdict.DIFFERENT,
            notes=("a config of `another` model",),
            tensors=tensors,
            moves=moves,
            outputs=outputs,
        ),
        first="ported",
        second="original",
    )
