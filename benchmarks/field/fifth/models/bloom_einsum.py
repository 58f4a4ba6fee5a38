import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import BloomConfig, BloomForCausalLM


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


N, W, V = 4, 48, 80


class BloomLayer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
        self.pre, self.post = nn.LayerNorm(W), nn.LayerNorm(W)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.empty(N, W // N, W)) for _ in range(3))
        self.bq, self.bk, self.bv = (nn.Parameter(torch.empty(N, 1, W // N)) for _ in range(3))
        self.wo, self.bo = nn.Parameter(torch.empty(W, W)), nn.Parameter(torch.empty(W))
        self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)

    def attend(self, x):
        B, T, _ = x.shape
        q = torch.einsum("btc,hdc->bhtd", x, self.wq) + self.bq
        k = torch.einsum("btc,hdc->bhtd", x, self.wk) + self.bk
        v = torch.einsum("btc,hdc->bhtd", x, self.wv) + self.bv
        slope = 2.0 ** (-8.0 / N * torch.arange(1, N + 1))
        t = torch.arange(T)
        bias = slope[:, None, None] * (t[None, :] - t[:, None])
        score = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(W / N)
        score = score + bias
        score = score + torch.full((T, T), -torch.inf).triu(1)
        prob = score.softmax(-1)
        mixed = torch.einsum("bhqk,bhkd->bqhd", prob, v)
        return mixed.reshape(B, T, W) @ self.wo.T + self.bo

    def forward(self, x):
        x = x + self.attend(self.pre(x))
        return x + self.down(F.gelu(self.up(self.post(x)), approximate="tanh"))


class Bloom(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.tok_norm = nn.Embedding(V, W), nn.LayerNorm(W)
        self.blocks = nn.ModuleList([BloomLayer(i) for i in range(2)])
        self.last = nn.LayerNorm(W)

    def forward(self, ids):
        x = self.tok_norm(self.tok(ids))
        for b in self.blocks:
            x = b(x)
        return self.last(x) @ self.tok.weight.T


def fill(port, ref):
    t = ref.transformer
    port.tok.load_state_dict(t.word_embeddings.state_dict())
    port.tok_norm.load_state_dict(t.word_embeddings_layernorm.state_dict())
    port.last.load_state_dict(t.ln_f.state_dict())
    for b, r in zip(port.blocks, t.h):
        b.pre.load_state_dict(r.input_layernorm.state_dict())
        b.post.load_state_dict(r.post_attention_layernorm.state_dict())
        a = r.self_attention
        weight = a.query_key_value.weight.view(N, 3, W // N, W)
        offset = a.query_key_value.bias.view(N, 3, 1, W // N)
        for j, part in enumerate("qkv"):
            getattr(b, "w" + part).data.copy_(weight[:, j])
            getattr(b, "b" + part).data.copy_(offset[:, j])
        b.wo.data.copy_(a.dense.weight)
        b.bo.data.copy_(a.dense.bias)
        b.up.load_state_dict(r.mlp.dense_h_to_4h.state_dict())
        b.down.load_state_dict(r.mlp.dense_4h_to_h.state_dict())


def make():
    cfg = BloomConfig(vocab_size=V, hidden_size=W, n_layer=2, n_head=N, pad_token_id=3)
    cfg._attn_implementation = "eager"
    reference = draw(BloomForCausalLM(cfg), 43, std=0.3)
    port = Bloom().eval()
    fill(port, reference)
    torch.manual_seed(3)
    return port, reference, torch.randint(4, V, (2, 13))
