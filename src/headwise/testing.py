"""Tools for tests of attention: the error budget that headwise's own tests use.

from headwise.testing import Budget

Budget.for_head_outputs(q, k, v, mask=mask).assert_holds(A @ v)
"""

from headwise.error_budget.budget import Budget, BudgetVerdict

__all__ = ["Budget", "BudgetVerdict"]
