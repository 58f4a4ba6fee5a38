"""Tools for tests of attention code; headwise's tests use the same classes.

from headwise.testing import Budget, assert_same_function

Budget.for_head_outputs(q, k, v, mask=mask).assert_holds(A @ v)
assert_same_function(ported_layer, original_layer)
"""

from __future__ import annotations

from headwise.diagnosis._compare import Comparable, compare
from headwise.diagnosis.probes import ComparisonInputs
from headwise.function.budget import Budget, BudgetVerdict

__all__ = ["Budget", "BudgetVerdict", "assert_same_function"]


def assert_same_function(
    a: Comparable, b: Comparable, inputs: ComparisonInputs | None = None, *, gradients: bool = False
) -> None:
    """Raise AssertionError with the diagnosis, unless two attentions are the same function.

    Args:
        a: the attention in doubt; see `headwise.compare`.
        b: the attention that it should equal.
        inputs: as in `headwise.compare`; None for inputs that headwise makes.
        gradients: also raise if outputs agree and gradients do not.

    Raises:
        AssertionError: they differ, or the inputs could not have shown a difference.
        OptionError, ShapeError: as in `headwise.compare`.
    """
    diagnosis = compare(a, b, inputs, gradients=gradients)
    if not diagnosis:
        raise AssertionError(str(diagnosis))
