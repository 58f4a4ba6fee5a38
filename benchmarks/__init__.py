"""Benchmarks of speed and memory against other libraries: ``python -m benchmarks``."""

import logging

# transformers imports torchao where it is installed, which warns of extensions for GPUs and of its
# own use of torch. Neither belongs to the figures.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
