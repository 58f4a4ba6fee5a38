"""A port in parts, in PyTorch and in NumPy, whose parts a fault or a repair replaces.

Nothing here is written with the code that writes repairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headwise import Attention, Rotary
from headwise.identify.comparison import FoundCause
from tests.diagnosis.repairs.code import define, name_weights

WIDTH, HEADS, HEAD_DIM = 40, 6, 8
PLAIN: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"window": (None, 0)}
LLAMA: dict[str, Any] = {"rotary": Rotary(), "num_kv_heads": 2, **CAUSAL}

TORCH = {
    "weights": "",
    "sizes": "num_heads, num_kv_heads, head_dim = 6, 2, 8",
    "projections": """
def split(y, count):
    return y.view(y.shape[0], y.shape[1], count, head_dim).transpose(1, 2)
q = split(x @ wq.mT + bq, num_heads)
k = split(x @ wk.mT + bk, num_kv_heads)
v = split(x @ wv.mT + bv, num_kv_heads)
""",
    "norms": "",
    "frequencies": "inv_freq = 1 / 10_000.0 ** (torch.arange(0, 8, 2).float() / 8)",
    "angles": "angles = torch.outer(torch.arange(x.shape[1]).float(), inv_freq)",
    "tables": """
cos = torch.cat((angles, angles), -1).cos()
sin = torch.cat((angles, angles), -1).sin()
""",
    "turn": """
def partner(y):
    return torch.cat((-y[..., 4:], y[..., :4]), -1)
q = q * cos + partner(q) * sin
k = k * cos + partner(k) * sin
""",
    "cache": "",
    "groups": """
group = num_heads // num_kv_heads
k, v = (y[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for y in (k, v))
""",
    "scores": 'scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * head_dim**-0.5',
    "softcap": "",
    "bias": "",
    "mask": """
future = torch.ones(scores.shape[-2:]).triu(1).bool()
scores = scores.masked_fill(future, -torch.inf)
""",
    "padding": """
if mask is not None:
    scores = scores.masked_fill(mask.logical_not(), -torch.inf)
""",
    "softmax": "weights = torch.softmax(scores, dim=-1)",
    "mix": "outputs = weights @ v",
    "output": "output = outputs.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1) @ wo.mT + bo",
}
NUMPY = {
    **TORCH,
    "projections": """
def split(y, count):
    return y.reshape(y.shape[0], y.shape[1], count, head_dim).transpose(0, 2, 1, 3)
q = split(x @ wq.T + bq, num_heads)
k = split(x @ wk.T + bk, num_kv_heads)
v = split(x @ wv.T + bv, num_kv_heads)
""",
    "frequencies": "inv_freq = 1 / 10_000.0 ** (np.arange(0, 8, 2) / 8)",
    "angles": "angles = np.outer(np.arange(x.shape[1]), inv_freq)",
    "tables": """
cos = np.cos(np.concatenate((angles, angles), -1))
sin = np.sin(np.concatenate((angles, angles), -1))
""",
    "turn": TORCH["turn"].replace("torch.cat", "np.concatenate"),
    "groups": "k, v = (np.repeat(y, num_heads // num_kv_heads, 1) for y in (k, v))",
    "scores": 'scores = np.einsum("bhqd,bhkd->bhqk", q, k) * head_dim**-0.5',
    "mask": "scores = np.where(np.triu(np.ones(scores.shape[-2:]), 1), -np.inf, scores)",
    "padding": """
if mask is not None:
    scores = np.where(np.logical_not(mask), -np.inf, scores)
""",
    "softmax": """
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights = weights / weights.sum(-1, keepdims=True)
""",
    "output": """
output = outputs.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1) @ wo.T + bo
""",
}
# The words of a repair -> the parts that its lines replace.
REPLACED = {
    "where the sizes are set": ("sizes",),
    "where q and k are normalised": ("norms",),
    "where q and k are normalised and rotated": ("norms", "tables", "turn"),
    "where the frequencies are computed": ("frequencies",),
    "where the angles are computed": ("angles",),
    "where q and k are rotated": ("tables", "turn"),
    "for the whole rotation": ("frequencies", "angles", "tables", "turn"),
    "where keys are added to the cache": ("cache",),
    "where kv heads are repeated": ("groups",),
    "where the scores are computed": ("scores",),
    "where scores are capped": ("softcap",),
    "where the bias is added to the scores": ("bias",),
    "where keys are hidden": ("mask", "padding"),
    "from where keys are hidden to the softmax": ("mask", "padding", "softmax"),
    "in place of the softmax": ("softmax",),
    "where values are mixed": ("mix",),
    "where the output is computed": ("output",),
}
# ... -> the part that they follow.
ADDED = {
    "once, on the weights": "weights",
    "where q, k and v are computed": "projections",
    "before scores are capped, biased or masked": "scores",
}


@dataclass(frozen=True)
class Case:
    """A fault in a port.

    Attributes:
        cause: its name.
        options: of the layer that the port should be.
        wrong: parts with the fault.
        right: parts that differ from those of a plain layer.
    """

    cause: str
    options: Mapping[str, Any]
    wrong: Mapping[str, str]
    right: Mapping[str, str] = field(default_factory=dict)
    language: str = "torch"
    arguments: str = "x, mask=None"
    width: int = WIDTH

    def __str__(self) -> str:
        return f"{self.cause}, {self.language}"

    def layer(self) -> Attention:
        """Return the layer, whose biases and norms are no zeros and ones."""
        torch.manual_seed(1)
        layer = Attention(self.width, HEADS, head_dim=HEAD_DIM, **self.options)
        with torch.no_grad():
            for x in layer.parameters():
                x.add_(0.3 * torch.randn_like(x)) if x.dim() == 1 or not x.any() else x.mul_(1.5)
        return layer

    @property
    def parts(self) -> dict[str, str]:
        """The parts of the right port."""
        parts = dict(NUMPY if self.language == "numpy" else TORCH)
        if "rotary" not in self.options:
            parts |= dict.fromkeys(("frequencies", "angles", "tables", "turn"), "")
        if "num_kv_heads" not in self.options:
            parts["groups"] = ""
            parts["sizes"] = "num_heads, head_dim = 6, 8"
        if self.options.get("window", (None, None))[1] != 0:
            parts["mask"] = ""
        if "mask" not in self.arguments:
            parts["padding"] = ""
        return parts | dict(self.right)

    def port(self, repair: FoundCause | None = None) -> Callable[..., Any]:
        """Return the port with its fault, and with the lines of a repair of it."""
        return self.function(self.parts | dict(self.wrong), repair)

    def function(
        self, parts: dict[str, str], repair: FoundCause | None = None
    ) -> Callable[..., Any]:
        """Return a port of these parts."""
        around = None
        if "num_kv_heads" not in self.options:
            parts["projections"] = parts["projections"].replace("num_kv_heads", "num_heads")
        if repair is not None:
            if repair.place in ADDED:
                parts[ADDED[repair.place]] += f"\n{repair.repair}"
            elif repair.place == "around the function":
                around = repair.repair
            else:
                *others, last = REPLACED[repair.place]
                parts |= dict.fromkeys(others, "") | {last: repair.repair}
        lines = [line for part in parts.values() for line in part.splitlines() if line.strip()]
        names = name_weights(self.layer(), self.language)
        function = define(lines, names, self.arguments)
        return function if around is None else define([around], {"function": function}, "x")
