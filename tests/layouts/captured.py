"""Small models of transformers, and what one of their attention modules is given and gives."""

from typing import Any

import pytest
import torch
from torch import nn

from headwise import Mask
from tests.layouts.real import BATCH, LENGTH, Real, sharpen

SINGLE = torch.finfo(torch.float32).eps  # of the softmax and the angles, whatever the dtype
VOCABULARY = 50
THETA = 100.0  # small, so that every pair of channels turns by much within LENGTH
GROUPED: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 56,
}
# Where the width of a head is that of the model over the number of heads.
DIVIDED: dict[str, Any] = {
    "hidden_size": 120,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "intermediate_size": 56,
}
WHOLE: dict[str, Any] = {"hidden_size": 120, "num_attention_heads": 12, "intermediate_size": 56}


def angles(share: float = 1.0) -> dict[str, Any]:
    """The rotation of a config; ``share`` of a head is rotated."""
    part = {} if share == 1.0 else {"partial_rotary_factor": share}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": THETA} | part}


def model_of(name: str, *, attention: str = "eager", **sizes: Any) -> nn.Module:
    """A model of one layer, or as many as ``sizes`` says, in float64.

    Args:
        name: of its config's class.
        attention: which of transformers' implementations it runs.
        sizes: of the config.
    """
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_hidden_layers": 1}
    config = getattr(transformers, name)(**common | sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation=attention)
    model = model.double().eval()
    sharpen(model)
    found: nn.Module = model
    return found


class Seen(Exception):  # noqa: N818  no error
    """Raised to leave a model where its attention is done."""


@torch.no_grad()
def captured(
    model: nn.Module,
    inside: str,
    *,
    options: dict[str, Any],
    mask: Mask | None = None,
    unit: float = SINGLE,
) -> Real:
    """The module ``inside`` a model that reads random tokens.

    A residual that the module adds to its output, as BLOOM's does, is taken off again.
    """
    module, seen = model.get_submodule(inside), {}

    def keep(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        residual = kwargs.get("residual", args[1] if len(args) > 1 else None)
        out = output[0] if isinstance(output, tuple) else output
        is_added = isinstance(residual, torch.Tensor) and residual.shape == out.shape
        seen.update(x=given, outputs=out - residual if is_added else out)
        raise Seen

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    with module.register_forward_hook(keep, with_kwargs=True), pytest.raises(Seen):
        model(tokens)
    state = {name: x.clone() for name, x in module.state_dict().items()}
    whole = Mask.causal() if mask is None else mask
    return Real(state, seen["x"], seen["outputs"], options, whole, unit)
