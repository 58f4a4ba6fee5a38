import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from einops import einsum, rearrange, repeat
from transformers import ModernBertConfig, ModernBertModel


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


C, H, V = 48, 4, 80
LOCAL, GLOBAL = 100.0, 10000.0


def rotary(x, theta):
    T, d = x.shape[-2:]
    freq = 1.0 / theta ** (torch.arange(0, d, 2) / d)
    angle = repeat(einsum(torch.arange(T).float(), freq, "t, f -> t f"), "t f -> t (two f)", two=2)
    one, two = rearrange(x, "... (two f) -> two ... f", two=2)
    return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()


class Attn(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.local = local
        self.Wqkv, self.Wo = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x, real):
        q, k, v = rearrange(self.Wqkv(x), "b t (three h d) -> three b h t d", three=3, h=H)
        theta = LOCAL if self.local else GLOBAL
        q, k = rotary(q, theta), rotary(k, theta)
        scores = einsum(q, k, "b h i d, b h j d -> b h i j") * q.shape[-1] ** -0.5
        allowed = rearrange(real, "b j -> b 1 1 j")
        if self.local:
            t = torch.arange(x.shape[1])
            allowed = allowed & ((t[:, None] - t[None, :]).abs() <= 3)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = einsum(scores.softmax(dim=-1), v, "b h i j, b h j d -> b h i d")
        return self.Wo(rearrange(out, "b h t d -> b t (h d)"))


class Layer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.attn_norm = nn.LayerNorm(C, bias=False) if i else nn.Identity()
        self.attn = Attn(i % 3 != 0)
        self.mlp_norm = nn.LayerNorm(C, bias=False)
        self.mlp = nn.ModuleDict({"Wi": nn.Linear(C, 128, bias=False), "Wo": nn.Linear(64, C, bias=False)})

    def forward(self, x, real):
        x = x + self.attn(self.attn_norm(x), real)
        a, g = self.mlp["Wi"](self.mlp_norm(x)).chunk(2, -1)
        return x + self.mlp["Wo"](F.gelu(a) * g)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"tok_embeddings": nn.Embedding(V, C), "norm": nn.LayerNorm(C, bias=False)})
        self.layers = nn.ModuleList([Layer(i) for i in range(3)])
        self.final_norm = nn.LayerNorm(C, bias=False)

    def forward(self, input_ids, attention_mask):
        x = self.embeddings["norm"](self.embeddings["tok_embeddings"](input_ids))
        for layer in self.layers:
            x = layer(x, attention_mask.bool())
        return self.final_norm(x)


def make():
    cfg = ModernBertConfig(hidden_size=C, num_attention_heads=H, num_hidden_layers=3, vocab_size=V, intermediate_size=64, local_attention=6,
                           layer_types=["full_attention", "sliding_attention", "sliding_attention"], attention_bias=True, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, max_position_embeddings=64,
                           rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": GLOBAL},
                                            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL}})
    cfg._attn_implementation = "eager"
    reference = draw(ModernBertModel(cfg), 45, std=0.3)
    port = Encoder().eval()
    port.load_state_dict(reference.state_dict())
    torch.manual_seed(5)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return port, reference, {"input_ids": torch.randint(3, V, (2, 16)), "attention_mask": mask}
