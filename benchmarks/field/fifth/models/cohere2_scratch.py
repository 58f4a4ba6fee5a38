import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Cohere2Config, Cohere2ForCausalLM


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



class Args:
    dim, n_heads, n_kv, hd, vocab, window, theta = 64, 8, 2, 8, 90, 6, 300.0
    rotary_layers = (True, True, False)


def freqs(T, a):
    f = 1.0 / a.theta ** (torch.arange(0, a.hd, 2).float() / a.hd)
    return torch.polar(torch.ones(T, a.hd // 2), torch.outer(torch.arange(T).float(), f))


def rotate(x, table):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * table[None, :, None]).flatten(3)


def expand(x, n):
    b, t, h, d = x.shape
    return x[:, :, :, None, :].expand(b, t, h, n, d).reshape(b, t, h * n, d)


class Attention(nn.Module):
    def __init__(self, a, local):
        super().__init__()
        self.a, self.local = a, local
        self.wq = nn.Linear(a.dim, a.n_heads * a.hd, bias=False)
        self.wk = nn.Linear(a.dim, a.n_kv * a.hd, bias=False)
        self.wv = nn.Linear(a.dim, a.n_kv * a.hd, bias=False)
        self.wo = nn.Linear(a.n_heads * a.hd, a.dim, bias=False)

    def forward(self, x, table):
        a = self.a
        b, t, _ = x.shape
        xq, xk, xv = (w(x).view(b, t, -1, a.hd) for w in (self.wq, self.wk, self.wv))
        if self.local:
            xq, xk = rotate(xq, table), rotate(xk, table)
        n = a.n_heads // a.n_kv
        keys = expand(xk, n)
        values = expand(xv, n)
        bias = torch.full((t, t), float("-inf")).triu(1)
        if self.local:
            bias = bias + torch.full((t, t), float("-inf")).tril(-a.window)
        scores = xq.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(a.hd) + bias
        out = torch.softmax(scores.float(), -1) @ values.transpose(1, 2)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, a, local):
        super().__init__()
        self.norm = nn.LayerNorm(a.dim, bias=False)
        self.attention = Attention(a, local)
        self.w1, self.w3, self.w2 = nn.Linear(a.dim, 64, bias=False), nn.Linear(a.dim, 64, bias=False), nn.Linear(64, a.dim, bias=False)

    def forward(self, x, table):
        h = self.norm(x)
        return x + self.attention(h, table) + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Command(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        self.tok, self.norm = nn.Embedding(a.vocab, a.dim), nn.LayerNorm(a.dim, bias=False)
        self.layers = nn.ModuleList([Layer(a, local) for local in a.rotary_layers])

    def forward(self, ids):
        x, table = self.tok(ids), freqs(ids.shape[1], self.a)
        for layer in self.layers:
            x = layer(x, table)
        return 0.25 * self.norm(x) @ self.tok.weight.T


MAP = {"model.embed_tokens": "tok", "model.norm": "norm", "model.": "", "input_layernorm": "norm", "self_attn.q_proj": "attention.wq",
       "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
       "mlp.gate_proj": "w1", "mlp.up_proj": "w3", "mlp.down_proj": "w2"}


def make():
    cfg = Cohere2Config(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3, vocab_size=90, intermediate_size=64,
                        sliding_window=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"], logit_scale=0.25,
                        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    cfg.head_dim = 8
    cfg._attn_implementation = "eager"
    reference = draw(Cohere2ForCausalLM(cfg), 54)
    weights = {}
    for name, w in reference.state_dict().items():
        if name == "lm_head.weight":
            continue
        for old, new in MAP.items():
            name = name.replace(old, new)
        weights[name] = w
    port = Command(Args()).eval()
    port.load_state_dict(weights)
    torch.manual_seed(4)
    return port, reference, torch.randint(3, 90, (2, 15))
