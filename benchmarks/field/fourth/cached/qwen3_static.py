import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


def draw(module, std, seed):
    """Weights wide enough that the softmax is not flat; biases and gains drawn too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("sinks"):
                p.normal_(0.5, 1.0)
            elif p.dim() < 2 or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.normal_(0, std)
    return module.eval()

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

THETA = 50.0


class Static:
    """Buffers of a fixed length, filled from the left; state is a dictionary with the number of slots in use."""

    def __init__(self, sd, heads, groups, d, slots=32):
        self.sd, self.heads, self.groups, self.d, self.slots = sd, heads, groups, d, slots

    def start(self, batch):
        zero = lambda: torch.zeros(batch, self.groups, self.slots, self.d)
        return {"k": zero(), "v": zero(), "used": 0}

    def project(self, x, name):
        return (x @ self.sd[name + ".weight"].T + self.sd[name + ".bias"]).unflatten(-1, (-1, self.d)).transpose(1, 2)

    def norm(self, x, name):
        return F.rms_norm(x, (self.d,), self.sd[name + ".weight"], 1e-6)

    def rotate(self, x, first):
        a = (first + torch.arange(x.shape[2]))[:, None] * THETA ** (-torch.arange(0, self.d, 2) / self.d)
        l, r = x.chunk(2, -1)
        return torch.cat([l * a.cos() - r * a.sin(), r * a.cos() + l * a.sin()], -1)

    def step(self, x, state):
        T, n = x.shape[1], state["used"]
        q, k, v = self.norm(self.project(x, "q_proj"), "q_norm"), self.project(x, "k_proj"), self.project(x, "v_proj")
        k = self.norm(k, "k_norm")
        q, k = self.rotate(q, n), self.rotate(k, n)
        keys, values = state["k"].clone(), state["v"].clone()
        at = n + torch.arange(T)
        keys[:, :, at], values[:, :, at] = k, v
        seen = torch.arange(self.slots)[None] <= at[:, None]
        scores = torch.einsum("bgmtd,bgsd->bgmts", q.unflatten(1, (self.groups, -1)), keys) / math.sqrt(self.d)
        w = scores.masked_fill(~seen, -1e30).softmax(-1)
        y = torch.einsum("bgmts,bgsd->btgmd", w, values).flatten(2)
        out = y @ self.sd["o_proj.weight"].T + self.sd["o_proj.bias"]
        return out, {"k": keys, "v": values, "used": n + T}


def make():
    config = Qwen3Config(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=12, attention_bias=True,
                         num_hidden_layers=1, max_position_embeddings=64,
                         rope_parameters={"rope_type": "default", "rope_theta": THETA})
    reference = draw(Qwen3Attention(config, layer_idx=0), 0.25, 411)
    port = Static({k: v.detach().clone() for k, v in reference.state_dict().items()}, 4, 2, 12)
    return port, reference, None
