"""Error budget for tests of attention code; headwise's tests use the same class.

from headwise.testing import Budget

Budget.for_head_outputs(q, k, v, mask=mask).assert_holds(A @ v)
"""

from headwise.error_budget.budget import Budget
from headwise.error_budget.verdict import BudgetVerdict

__all__ = ["Budget", "BudgetVerdict"]
