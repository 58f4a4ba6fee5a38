import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import ApertusConfig
from transformers.models.apertus.modeling_apertus import ApertusAttention


def draw(net, seed, std=0.25):
    """Weights large enough that no softmax is flat; gains spread about their start; biases drawn."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                p.add_(0.3 * torch.randn_like(p))
            elif p.dim() == 1:
                p.copy_(0.4 * torch.randn_like(p))
            else:
                p.copy_(std * torch.randn_like(p))
    return net.eval()


def config():
    cfg = ApertusConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=50,
                        intermediate_size=64, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    cfg.head_dim = 12
    cfg._attn_implementation = "eager"
    return cfg


class Stepper:
    """Plain tensors, no transformers code: state is (position, keys, values)."""

    def __init__(self, attn, heads=4, kv=2, size=12, theta=1000.0):
        self.w = {n: p.detach().clone() for n, p in attn.named_parameters()}
        self.heads, self.kv, self.size = heads, kv, size
        self.freq = theta ** (-torch.arange(0, size, 2) / size)

    def start(self, batch):
        empty = torch.zeros(batch, 0, self.kv, self.size)
        return {"at": 0, "k": empty, "v": empty}

    def norm(self, t, name):
        return F.rms_norm(t, (self.size,), self.w[name], 1e-5)

    def rotate(self, t, at):
        angle = torch.outer(torch.arange(at, at + t.shape[1]).float(), self.freq)[None, :, None]
        a, b = t.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def step(self, x, state):
        B, T, _ = x.shape
        at = state["at"]
        q = self.norm((x @ self.w["q_proj.weight"].T).view(B, T, self.heads, self.size), "q_norm.weight")
        k = self.norm((x @ self.w["k_proj.weight"].T).view(B, T, self.kv, self.size), "k_norm.weight")
        v = (x @ self.w["v_proj.weight"].T).view(B, T, self.kv, self.size)
        q, k = self.rotate(q, at), self.rotate(k, at)
        keys = torch.cat([state["k"], k], 1)
        values = torch.cat([state["v"], v], 1)
        state = {"at": at + T, "k": keys, "v": values}
        scores = torch.einsum("btjgd,bsjd->bjgts", q.unflatten(2, (self.kv, -1)), keys) / self.size ** 0.5
        S = keys.shape[1]
        future = torch.arange(S)[None] > torch.arange(S - T, S)[:, None]
        scores = scores.masked_fill(future, -torch.inf)
        y = torch.einsum("bjgts,bsjd->btjgd", scores.softmax(-1), values)
        return y.reshape(B, T, -1) @ self.w["o_proj.weight"].T, state


def make():
    reference = draw(ApertusAttention(config(), layer_idx=0), 33)
    return Stepper(reference), reference, None
