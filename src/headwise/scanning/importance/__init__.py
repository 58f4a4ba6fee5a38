"""Head importance: what the loss of a model has of each head.

    gradients    by the gradient of a gate on every head: one backward pass for all of them
    ablations    by what is lost without it: one forward pass for each head

Both give a `HeadScan`, so that ``scan["gate_gradient"]`` is a tensor (layers, heads), and scans of
parts of the data merge into the scan of all of it. The loss is one number for each sequence:

    scan = gradients(tiny.load(), tiny.encode(text)[None])
    scan = gradients(model, {"input_ids": ids, "attention_mask": mask})
    scan = gradients(model, inputs, loss=lambda output, given: loss_of(output).mean(-1))

    headwise.scanning.statistics.importance_statistics   what each measure means, and its source
    losses.py        the default loss, and what a loss must be
"""

from headwise.scanning.importance.ablations import ablations, mean_outputs
from headwise.scanning.importance.gradients import gradients
from headwise.scanning.importance.losses import next_token

__all__ = ["ablations", "gradients", "mean_outputs", "next_token"]
