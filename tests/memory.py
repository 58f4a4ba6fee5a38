"""What a piece of code writes: the largest tensor that any torch operator in it returned."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the memory of the largest tensor returned while it is on.

    Views count as what they view. Operators of our own are opaque to it: call what is inside them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.name = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.bytes:
                self.bytes, self.name = tensor.untyped_storage().nbytes(), str(func)
        return result


def test_it_sees_a_large_temporary() -> None:
    with LargestTensor() as seen:
        torch.zeros(100, 50).sum()
    assert seen.bytes == 100 * 50 * 4
