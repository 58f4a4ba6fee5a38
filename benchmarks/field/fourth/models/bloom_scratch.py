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

from transformers import BloomConfig, BloomForCausalLM


def slopes(n):
    """Geometric for the power of two below; the rest taken in between."""
    near = 2 ** math.floor(math.log2(n))
    out = [2 ** (-8 * (i + 1) / near) for i in range(near)]
    out += [2 ** (-4 * (2 * i + 1) / near) for i in range(n - near)]
    return torch.tensor(out)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out, self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, bias):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, self.h, 3, self.d).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Bloom(nn.Module):
    def __init__(self, vocab, dim, heads, layers):
        super().__init__()
        self.emb, self.first, self.last = nn.Embedding(vocab, dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.slopes = slopes(heads)

    def forward(self, ids):
        T = ids.shape[1]
        i = torch.arange(T)
        bias = self.slopes[:, None, None] * (i[None] - i[:, None])
        bias = bias.masked_fill(i[None] > i[:, None], float("-inf"))
        x = self.first(self.emb(ids))
        for layer in self.layers:
            x = layer(x, bias)
        return self.last(x) @ self.emb.weight.T


NAMES = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2", "self_attention.query_key_value": "qkv",
         "self_attention.dense": "out", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"}


def load(port, sd):
    t = {}
    for k, v in sd.items():
        k = k.removeprefix("transformer.").replace("word_embeddings_layernorm", "first").replace("word_embeddings", "emb")
        k = k.replace("ln_f", "last").replace("h.", "layers.", 1) if k.startswith(("h.", "ln_f")) else k
        for a, b in NAMES.items():
            k = k.replace(a, b)
        if k != "lm_head.weight":
            t[k] = v
    port.load_state_dict(t)
    return port


def make():
    c = BloomConfig(vocab_size=80, hidden_size=48, n_layer=2, n_head=6, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    reference = draw(BloomForCausalLM(c), 0.22, 331)
    port = load(Bloom(80, 48, 6, 2), reference.state_dict())
    return port.eval(), reference, torch.randint(0, 80, (2, 14))
