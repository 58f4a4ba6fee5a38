"""The input projection: `torch.nn.functional.linear`, faster where no gradient is wanted on CPU.

In CPU inference in float32, oneDNN's matrix product was 5 to 20 % faster than the BLAS call behind
F.linear (docs/log.md). It has no gradient, so it serves plain tensors in eager inference only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import has_torch_function

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, with F.linear's shapes, errors and gradients."""
    if _ONEDNN and _is_plain_inference(x, weight, bias):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return linear(x, weight, bias)


def _is_plain_inference(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return (
        bool(torch.backends.mkldnn.enabled)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and not torch.is_autocast_enabled("cpu")
        and not has_torch_function(tensors)
        and not torch._C._functorch.peek_interpreter_stack()
        and torch._C._len_torch_dispatch_stack() == 0
        and x.numel() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and x.is_contiguous()
        and (bias is None or bias.shape == weight.shape[:1])
    )
