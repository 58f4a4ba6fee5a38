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

from transformers import Gemma2Config, Gemma2ForCausalLM


def norm(x, w, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + w)


def rope(x, theta=10000.0):
    n, d = x.shape[-2:]
    a = torch.arange(n)[:, None] / theta ** (torch.arange(0, d, 2) / d)
    l, r = x.split(d // 2, -1)
    return torch.cat((l * a.cos() - r * a.sin(), r * a.cos() + l * a.sin()), -1)


class Gemma(nn.Module):
    """All in one: the tensors stay in a dictionary under the names of the checkpoint."""

    def __init__(self, sd, cfg):
        super().__init__()
        self.names = list(sd)
        self.w = nn.ParameterList(nn.Parameter(t.clone()) for t in sd.values())
        self.heads, self.groups, self.d = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.scalar, self.cap, self.final = cfg.query_pre_attn_scalar, cfg.attn_logit_softcapping, cfg.final_logit_softcapping
        self.window, self.layers = cfg.sliding_window, cfg.num_hidden_layers

    def attention(self, x, p, i):
        B, T, _ = x.shape
        q = (x @ p("q_proj").T).view(B, T, self.heads, self.d).transpose(1, 2)
        k = (x @ p("k_proj").T).view(B, T, self.groups, self.d).transpose(1, 2)
        v = (x @ p("v_proj").T).view(B, T, self.groups, self.d).transpose(1, 2)
        q, k = rope(q), rope(k)
        q = q * self.scalar ** -0.5
        q = q.unflatten(1, (self.groups, -1))
        s = torch.einsum("bgntd,bgsd->bgnts", q, k)
        s = torch.tanh(s / self.cap) * self.cap
        back = torch.arange(T)[:, None] - torch.arange(T)
        hide = back < 0
        if i % 2 == 0:
            hide = hide | (back >= self.window)
        s = torch.where(hide, -2.3e38, s)
        y = torch.einsum("bgnts,bgsd->btgnd", s.softmax(-1), v).flatten(2)
        return y @ p("o_proj").T

    def forward(self, ids):
        t = dict(zip(self.names, self.w))
        e = t["model.embed_tokens.weight"]
        x = e[ids] * math.sqrt(e.shape[1])
        for i in range(self.layers):
            at = lambda n: t[f"model.layers.{i}.{n}.weight"]
            h = norm(x, at("input_layernorm"))
            h = self.attention(h, lambda n: at("self_attn." + n), i)
            x = x + norm(h, at("post_attention_layernorm"))
            h = norm(x, at("pre_feedforward_layernorm"))
            h = (F.gelu(h @ at("mlp.gate_proj").T, approximate="tanh") * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
            x = x + norm(h, at("post_feedforward_layernorm"))
        z = norm(x, t["model.norm.weight"]) @ e.T
        return torch.tanh(z / self.final) * self.final


def make():
    cfg = Gemma2Config(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64,
                       num_hidden_layers=2, vocab_size=80, max_position_embeddings=64, sliding_window=5,
                       query_pre_attn_scalar=9, attn_logit_softcapping=3.0, bos_token_id=None, eos_token_id=None,
                       pad_token_id=None, attn_implementation="eager")
    reference = draw(Gemma2ForCausalLM(cfg), 0.22, 221)
    sd = {k: v for k, v in reference.state_dict().items() if k != "lm_head.weight"}
    return Gemma(sd, cfg).eval(), reference, torch.randint(0, 80, (2, 14))
