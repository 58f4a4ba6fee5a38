"""Parts of a module, such as its projections, whose outputs are stages of a call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.function.records import STAGES
from headwise.layers.hooks import record_modules

Result = TypeVar("Result")


def holds_modules(function: Callable[..., object]) -> bool:
    """True for a module with parts, its method, or a function that has a module in its closure."""
    cells = getattr(function, "__closure__", None) or ()
    owners = [function, getattr(function, "__self__", None)]
    owners += [cell.cell_contents for cell in cells]
    return any(isinstance(each, nn.Module) and any(each.children()) for each in owners)


@dataclass(frozen=True)
class Parts:
    """The modules that compute some stages of an attention.

    Raises:
        OptionError: a name that is no stage, or what is no module.
    """

    modules: Mapping[str, nn.Module]  # by stage
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        others = {name for name, part in self.modules.items() if not isinstance(part, nn.Module)}
        if unknown := sorted(({*self.modules} - {*STAGES}) | others):
            raise OptionError(
                saw=f"modules for {', '.join(unknown)}",
                needed=f"an nn.Module for each of some names among {', '.join(STAGES)}",
                do='give {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj}',
            )

    @torch.no_grad()
    def record(self, call: Callable[[], Result]) -> tuple[Result, dict[str, Tensor]]:
        """Return the result of a call, and the stages whose modules ran, with an axis of heads."""
        with record_modules(self.modules.values()) as runs:
            result = call()
        outputs = {
            stage: self._split(runs[module][-1].output, stage)
            for stage, module in self.modules.items()
            if runs[module]
        }
        return result, outputs

    def _split(self, output: Tensor, stage: str) -> Tensor:
        if stage == "output" or output.dim() != 3:
            return output
        heads = self.num_kv_heads if stage[0] in "kv" else self.num_heads
        if output.shape[-1] % heads:
            raise ShapeError(
                saw=f"the part for {stage} with outputs of {output.shape[-1]} channels",
                needed=f"as many channels for each of {heads} heads",
                do=f"name the module that computes {stage} alone",
            )
        rows: Tensor = output.unflatten(-1, (heads, -1))
        return rows.transpose(1, 2)
