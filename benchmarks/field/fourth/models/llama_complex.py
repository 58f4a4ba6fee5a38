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

from transformers import LlamaConfig, LlamaForCausalLM


def angles(dim, n, theta):
    freq = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    return torch.polar(torch.ones(n, dim // 2), torch.outer(torch.arange(n).float(), freq))


def spin(x, f):
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * f[None, :, None]
    return torch.view_as_real(z).flatten(3)


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads, self.groups, self.d = heads, groups, dim // heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, groups * self.d, bias=False) for _ in range(2))

    def forward(self, x, f, mask):
        B, T, _ = x.shape
        xq = self.wq(x).view(B, T, self.heads, self.d)
        xk = self.wk(x).view(B, T, self.groups, self.d)
        xv = self.wv(x).view(B, T, self.groups, self.d)
        xq, xk = spin(xq, f), spin(xk, f)
        n = self.heads // self.groups
        xk = xk[:, :, :, None].expand(B, T, self.groups, n, self.d).reshape(B, T, self.heads, self.d)
        xv = xv[:, :, :, None].expand(B, T, self.groups, n, self.d).reshape(B, T, self.heads, self.d)
        scores = xq.transpose(1, 2) @ xk.permute(0, 2, 3, 1) / math.sqrt(self.d) + mask
        out = F.softmax(scores.float(), -1).type_as(xq) @ xv.transpose(1, 2)
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, dim, heads, groups, hidden, eps):
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = Attention(dim, heads, groups), Norm(dim, eps), Norm(dim, eps)
        self.w1, self.w3, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x, f, mask):
        x = x + self.attention(self.attention_norm(x), f, mask)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, dim, heads, groups, hidden, layers, vocab, eps, theta):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, groups, hidden, eps) for _ in range(layers))
        self.norm, self.output = Norm(dim, eps), nn.Linear(dim, vocab, bias=False)
        self.f = angles(dim // heads, 64, theta)

    def forward(self, tokens):
        x, T = self.tok(tokens), tokens.shape[1]
        mask = torch.full((T, T), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, self.f[:T], mask)
        return self.output(self.norm(x))


def unpermute(w, heads):
    """Rows of the half-split layout back to the neighbouring pairs that the complex product turns."""
    return w.view(heads, 2, -1, w.shape[1]).transpose(1, 2).reshape(w.shape)


def load(port, sd, heads, groups):
    names = {"tok.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
    for i in range(len(port.layers)):
        a, b = f"layers.{i}.", f"model.layers.{i}."
        for mine, theirs in (("attention.wq", "self_attn.q_proj"), ("attention.wk", "self_attn.k_proj"),
                             ("attention.wv", "self_attn.v_proj"), ("attention.wo", "self_attn.o_proj"),
                             ("w1", "mlp.gate_proj"), ("w3", "mlp.up_proj"), ("w2", "mlp.down_proj"),
                             ("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            names[a + mine + ".weight"] = b + theirs + ".weight"
    out = {}
    for mine, theirs in names.items():
        t = sd[theirs]
        if ".wq." in mine:
            t = unpermute(t, heads)
        if ".wk." in mine:
            t = unpermute(t, groups)
        out[mine] = t
    port.load_state_dict(out)
    return port


def make():
    cfg = LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=72, num_hidden_layers=2,
                      vocab_size=80, max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
                      rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    reference = draw(LlamaForCausalLM(cfg), 0.22, 211)
    port = load(Llama(64, 8, 2, 72, 2, 80, 1e-5, 700.0), reference.state_dict(), 8, 2)
    return port.eval(), reference, torch.randint(0, 80, (2, 14))
