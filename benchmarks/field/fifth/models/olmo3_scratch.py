import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Olmo3Config, Olmo3ForCausalLM


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


C, H, J, D, L, V, WINDOW, THETA = 48, 6, 3, 8, 4, 70, 4, 2000.0
KINDS = ["local", "local", "local", "global"]


class RMS(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def rope_table(T):
    inv = THETA ** (-torch.arange(0, D, 2).float() / D)
    return torch.outer(torch.arange(T).float(), inv)


def rope(x, angle):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.q_proj = nn.Linear(C, H * D, bias=False)
        self.k_proj = nn.Linear(C, J * D, bias=False)
        self.v_proj = nn.Linear(C, J * D, bias=False)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm, self.k_norm = RMS(H * D), RMS(J * D)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x)).view(B, T, H, D).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).view(B, T, J, D).transpose(1, 2)
        v = self.v_proj(x).view(B, T, J, D).transpose(1, 2)
        angle = rope_table(T)
        q = rope(q, angle)
        k = rope(k, angle)
        i = torch.arange(T)
        keep = i[None, :] <= i[:, None]
        if self.kind == "local":
            keep = keep & (i[None, :] > i[:, None] - WINDOW)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, 64, bias=False), nn.Linear(C, 64, bias=False)
        self.down_proj = nn.Linear(64, C, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.self_attn, self.mlp = Attention(kind), MLP()
        self.post_attention_layernorm, self.post_feedforward_layernorm = RMS(C), RMS(C)

    def forward(self, x):
        x = x + self.post_attention_layernorm(self.self_attn(x))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = nn.ModuleList([Block(kind) for kind in KINDS])
        self.norm, self.lm_head = RMS(C), nn.Linear(C, V, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make():
    one = {"rope_type": "default", "rope_theta": THETA}
    cfg = Olmo3Config(hidden_size=C, num_attention_heads=H, num_key_value_heads=J, num_hidden_layers=L, vocab_size=V, intermediate_size=64,
                      sliding_window=WINDOW, layer_types=["sliding_attention"] * 3 + ["full_attention"], max_position_embeddings=64,
                      rope_parameters={"sliding_attention": dict(one), "full_attention": dict(one)}, rms_norm_eps=1e-6,
                      pad_token_id=0, eos_token_id=1)
    cfg._attn_implementation = "eager"
    reference = draw(Olmo3ForCausalLM(cfg), 41)
    port = Olmo().eval()
    port.load_state_dict({n.removeprefix("model."): w for n, w in reference.state_dict().items()})
    torch.manual_seed(1)
    return port, reference, torch.randint(2, V, (2, 15))
