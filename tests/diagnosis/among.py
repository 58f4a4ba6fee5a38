"""A comparison in which a few causes alone are tried, for tests of one of them."""

from collections.abc import Collection
from typing import Any

from headwise import Attention
from headwise.diagnosis import Inputs
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.probes import choose_inputs, make_further_probes
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.diagnosis.subjects.steps import make_function
from headwise.identify import Diagnosis
from headwise.identify.catalogue import CAUSES


def compare_among(
    names: Collection[str],
    port: Any,
    layer: Attention,
    inputs: Inputs | None = None,
    *,
    further: bool = False,
) -> Diagnosis:
    """Return what is said of a function or a layer beside a layer by the causes of these names."""
    is_layer = isinstance(port, Attention)
    function = NativeSubject(port) if is_layer else make_function(port, "port")
    known = NativeSubject(layer)
    assert function is not None
    causes = [cause for cause in CAUSES if cause.name in names]
    assert len(causes) == len(names)
    comparison = Comparison(function, known, choose_inputs(function, known, inputs), causes)
    comparison.further = make_further_probes((function, known)) if further else []
    return comparison.diagnosis()
