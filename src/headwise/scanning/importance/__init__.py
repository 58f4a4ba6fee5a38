"""Head importance: the effect of each head on the loss of a model.

    gradients    from the gradient of a gate on every head: one backward pass for all heads
    ablations    from the loss without a head: one forward pass for each head

Both return a `HeadScan`, so ``scan["gate_gradient"]`` is a tensor (layers, heads), and scans of
parts of the data can be merged. The loss is one number for each sequence:

    scan = gradients(tiny.load(), tiny.encode(text)[None])
    scan = gradients(model, {"input_ids": ids, "attention_mask": mask})
    scan = gradients(model, inputs, loss=lambda output, inputs: loss_of(output).mean(-1))

    headwise.scanning.statistics.importance   definition and source of each measure
    losses.py        the default loss, and the check of a loss
"""

from headwise.scanning.importance._ablations import ablations, mean_outputs
from headwise.scanning.importance._gradients import gradients
from headwise.scanning.importance.losses import next_token

__all__ = ["ablations", "gradients", "mean_outputs", "next_token"]
