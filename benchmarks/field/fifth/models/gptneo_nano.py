import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import GPTNeoConfig, GPTNeoForCausalLM


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



class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, local):
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd)
        seen = torch.tril(torch.ones(32, 32))
        if local:
            seen = torch.triu(seen, 1 - local)
        self.register_buffer("bias", seen.view(1, 1, 32, 32), persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = q @ k.transpose(-2, -1)  # GPT-Neo does not scale
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, local):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, local)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc, self.c_out = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Neo(nn.Module):
    def __init__(self, vocab=90, n_embd=48, n_head=4, n_layer=3):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(32, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, 0 if i % 2 == 0 else 5) for i in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def convert(sd):
    out = {}
    for name, w in sd.items():
        name = name.removeprefix("transformer.")
        if name == "lm_head.weight" or "attention.bias" in name or name.endswith("masked_bias"):
            continue
        if ".attention.k_proj" in name or ".attention.v_proj" in name:
            continue
        if ".attention.q_proj" in name:
            base = "transformer." + name
            w = torch.cat([sd[base], sd[base.replace("q_proj", "k_proj")], sd[base.replace("q_proj", "v_proj")]])
            name = name.replace("attn.attention.q_proj", "attn.c_attn")
        name = name.replace("attn.attention.out_proj", "attn.c_proj").replace("mlp.c_fc", "c_fc").replace("mlp.c_proj", "c_out")
        out[name] = w
    return out


def make():
    cfg = GPTNeoConfig(vocab_size=90, hidden_size=48, num_layers=3, num_heads=4, attention_types=[[["global", "local", "global"], 1]],
                       window_size=5, max_position_embeddings=32, intermediate_size=192, bos_token_id=1, eos_token_id=2)
    cfg._attn_implementation = "eager"
    reference = draw(GPTNeoForCausalLM(cfg), 42, std=0.2)
    port = Neo().eval()
    port.load_state_dict(convert(reference.state_dict()))
    torch.manual_seed(2)
    return port, reference, torch.randint(0, 90, (2, 14))
