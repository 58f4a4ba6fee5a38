"""The parting of a good and a faulty layer, against the truth of the case."""

from benchmarks.faults.cases import CaseKey
from benchmarks.faults.fault_case import (
    FaultCase,
    LayerStack,
    distance,
    first_parting,
    parted_heads,
)

ROUNDING = 1e-13


def output_of(case: FaultCase) -> str:
    last = len(case.good.layers) - 1 if isinstance(case.good, LayerStack) else None
    return "output" if last is None else f"layer {last} output"


def assert_parts_as_stated(case: FaultCase, key: CaseKey) -> None:
    """Assert that the output changes, and that the truth names the first parting."""
    good, faulty = case.probe.run(case.good), case.probe.run(case.faulty)
    output = output_of(case)
    gaps = [distance(a[output], b[output]) for a, b in zip(good, faulty, strict=True)]
    assert max(gaps) > 1e-9, key
    truth = case.truth
    assert first_parting(good, faulty, ROUNDING) == (truth.step, truth.full_stage), key
    if truth.stage == "output":
        assert truth.heads is None, key
        return
    values = good[truth.step][truth.full_stage]
    heads = parted_heads(values, faulty[truth.step][truth.full_stage], truth.stage, ROUNDING)
    if heads is not None:
        axis = 1 if truth.stage in ("scores", "weights") else 2
        expected = range(values.shape[axis]) if truth.heads is None else truth.heads
        assert heads == set(expected), key
