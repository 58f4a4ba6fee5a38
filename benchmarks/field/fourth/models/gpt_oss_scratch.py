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

from transformers import GptOssConfig, GptOssForCausalLM


def rms(x, w, eps=1e-5):
    return F.rms_norm(x, x.shape[-1:], w, eps)


class Attention(nn.Module):
    def __init__(self, c, i, theta):
        super().__init__()
        self.h, self.g, self.d, self.theta = c.num_attention_heads, c.num_key_value_heads, c.head_dim, theta
        self.window = c.sliding_window if i % 2 == 0 else 0
        self.qkv = nn.Linear(c.hidden_size, (self.h + 2 * self.g) * self.d)
        self.out = nn.Linear(self.h * self.d, c.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(self.h))

    def rotate(self, x):
        T = x.shape[1]
        inv = self.theta ** -(torch.arange(0, self.d, 2) / self.d)
        a = (torch.arange(T)[:, None] * inv)[None, :, None]
        l, r = x.chunk(2, -1)
        return torch.cat([l * a.cos() - r * a.sin(), r * a.cos() + l * a.sin()], -1)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.d).split([self.h, self.g, self.g], dim=2)
        q, k = self.rotate(q), self.rotate(k)
        q = q.view(B, T, self.g, self.h // self.g, self.d)
        s = torch.einsum("bqgmd,bkgd->bgmqk", q, k) / math.sqrt(self.d)
        mask = torch.full((T, T), -float("inf")).triu(1)
        if self.window > 0:
            mask = mask + torch.full((T, T), -float("inf")).tril(-self.window)
        s = s + mask
        sink = self.sinks.view(1, self.g, -1, 1, 1).expand(B, -1, -1, T, 1)
        w = torch.cat([s, sink], -1).softmax(-1)[..., :-1]
        y = torch.einsum("bgmqk,bkgd->bqgmd", w, v).flatten(2)
        return self.out(y)


class Experts(nn.Module):
    """Every expert on every token; the router's weights are zero for those not chosen."""

    def __init__(self, c):
        super().__init__()
        n, dim, ff = c.num_local_experts, c.hidden_size, c.intermediate_size
        self.router, self.top = nn.Linear(dim, n), c.num_experts_per_tok
        self.w1, self.b1 = nn.Parameter(torch.zeros(n, dim, 2 * ff)), nn.Parameter(torch.zeros(n, 2 * ff))
        self.w2, self.b2 = nn.Parameter(torch.zeros(n, ff, dim)), nn.Parameter(torch.zeros(n, dim))

    def forward(self, x):
        z = self.router(x)
        best, where = z.topk(self.top, -1)
        share = torch.zeros_like(z).scatter(-1, where, best.softmax(-1))
        u = torch.einsum("btc,ecf->btef", x, self.w1) + self.b1
        gate, up = u[..., ::2].clamp(max=7.0), u[..., 1::2].clamp(-7.0, 7.0)
        o = torch.einsum("btef,efc->btec", (up + 1) * gate * torch.sigmoid(1.702 * gate), self.w2) + self.b2
        return torch.einsum("btec,bte->btc", o, share)


class Model(nn.Module):
    def __init__(self, c, theta):
        super().__init__()
        self.emb, self.head = nn.Embedding(c.vocab_size, c.hidden_size), nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.att = nn.ModuleList(Attention(c, i, theta) for i in range(c.num_hidden_layers))
        self.moe = nn.ModuleList(Experts(c) for _ in range(c.num_hidden_layers))
        self.n1, self.n2 = (nn.ParameterList(nn.Parameter(torch.ones(c.hidden_size)) for _ in self.att) for _ in range(2))
        self.last = nn.Parameter(torch.ones(c.hidden_size))

    def forward(self, ids):
        x = self.emb(ids)
        for a, m, n1, n2 in zip(self.att, self.moe, self.n1, self.n2):
            x = x + a(rms(x, n1))
            x = x + m(rms(x, n2))
        return self.head(rms(x, self.last))


def load(port, sd):
    t = {"emb.weight": sd["model.embed_tokens.weight"], "head.weight": sd["lm_head.weight"], "last": sd["model.norm.weight"]}
    for i in range(len(port.att)):
        p = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            t[f"att.{i}.qkv.{kind}"] = torch.cat([sd[p + f"self_attn.{n}_proj.{kind}"] for n in "qkv"])
            t[f"att.{i}.out.{kind}"] = sd[p + "self_attn.o_proj." + kind]
            t[f"moe.{i}.router.{kind}"] = sd[p + "mlp.router." + kind]
        t[f"att.{i}.sinks"] = sd[p + "self_attn.sinks"]
        for mine, theirs in (("w1", "gate_up_proj"), ("b1", "gate_up_proj_bias"), ("w2", "down_proj"), ("b2", "down_proj_bias")):
            t[f"moe.{i}.{mine}"] = sd[p + "mlp.experts." + theirs]
        t[f"n1.{i}"], t[f"n2.{i}"] = sd[p + "input_layernorm.weight"], sd[p + "post_attention_layernorm.weight"]
    port.load_state_dict(t)
    return port


def make():
    c = GptOssConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=12, intermediate_size=32,
                     num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=80, sliding_window=5,
                     max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
                     rope_parameters={"rope_type": "default", "rope_theta": 200.0}, attn_implementation="eager")
    reference = draw(GptOssForCausalLM(c), 0.2, 321)
    port = load(Model(c, 200.0), reference.state_dict())
    return port.eval(), reference, torch.randint(0, 80, (2, 14))
