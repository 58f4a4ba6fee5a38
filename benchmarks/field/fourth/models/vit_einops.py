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

from einops import rearrange, repeat
from transformers import ViTConfig, ViTModel


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads, self.scale, self.p = heads, (dim // heads) ** -0.5, dropout
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = rearrange(self.to_qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        attn = dots.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class ViT(nn.Module):
    def __init__(self, size, patch, dim, heads, depth, mlp, channels=3, eps=1e-12):
        super().__init__()
        n = (size // patch) ** 2
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.zeros(1, n + 1, dim))
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(dim, eps), Attention(dim, heads), nn.LayerNorm(dim, eps),
                           nn.Sequential(nn.Linear(dim, mlp), nn.GELU(), nn.Linear(mlp, dim))]) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps)

    def forward(self, pixel_values):
        x = rearrange(pixel_values, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch, q=self.patch)
        x = torch.cat([repeat(self.cls, "1 1 d -> b 1 d", b=len(x)), self.embed(x)], 1) + self.pos
        for n1, attn, n2, mlp in self.blocks:
            x = x + attn(n1(x))
            x = x + mlp(n2(x))
        return self.norm(x)


def load(port, sd):
    sd = dict(sd)
    table = {"cls": sd["embeddings.cls_token"], "pos": sd["embeddings.position_embeddings"], "norm.weight": sd["layernorm.weight"],
             "norm.bias": sd["layernorm.bias"], "embed.weight": sd["embeddings.patch_embeddings.projection.weight"].flatten(1),
             "embed.bias": sd["embeddings.patch_embeddings.projection.bias"]}
    for i in range(len(port.blocks)):
        b = {k.split(f"layers.{i}.", 1)[1]: v for k, v in sd.items() if f"layers.{i}." in k}
        for kind in ("weight", "bias"):
            a = "attention."
            table[f"blocks.{i}.1.to_qkv.{kind}"] = torch.cat([b[a + n + "_proj." + kind] for n in "qkv"])
            table[f"blocks.{i}.1.to_out.{kind}"] = b[a + "o_proj." + kind]
            table[f"blocks.{i}.0.{kind}"], table[f"blocks.{i}.2.{kind}"] = b["layernorm_before." + kind], b["layernorm_after." + kind]
            table[f"blocks.{i}.3.0.{kind}"] = b[[k for k in b if "fc1." + kind in k or "intermediate.dense." + kind in k][0]]
            table[f"blocks.{i}.3.2.{kind}"] = b[[k for k in b if "fc2." + kind in k or ("output.dense." + kind in k and "attention" not in k)][0]]
    port.load_state_dict(table)
    return port


def make():
    cfg = ViTConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, image_size=12, patch_size=4)
    reference = draw(ViTModel(cfg, add_pooling_layer=False), 0.25, 301)
    port = load(ViT(12, 4, 48, 4, 2, 64), reference.state_dict()).eval()
    return port, reference, {"pixel_values": torch.randn(2, 3, 12, 12)}
