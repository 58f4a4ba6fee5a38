"""A small T5 with one table of biases for each stack: ml-explore/mlx-examples, t5/t5.py.

`T5.forward(input_ids, attention_mask, decoder_input_ids)` takes ids of the source, their 0/1 mask
and ids of the target, all of (batch, tokens), and returns logits for each token of the target.
"""

import math

import torch
from torch import nn

PEER = (
    "T5ForConditionalGeneration",
    {
        "vocab_size": 71,
        "d_model": 52,
        "d_kv": 10,
        "d_ff": 84,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.5,
        "decoder_start_token_id": 0,
    },
)


def relative_position_bucket(rpos, bidirectional, num_buckets, max_distance):
    buckets = torch.zeros_like(rpos)
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (rpos > 0).long() * num_buckets
        rpos = rpos.abs()
    else:
        rpos = (-rpos).clamp(min=0)

    # half of the buckets hold one distance, the others are wider and wider
    max_exact = num_buckets // 2
    scale = (num_buckets - max_exact) / math.log(max_distance / max_exact)
    large = max_exact + (torch.log(rpos.clamp(min=1).float() / max_exact) * scale).long()
    large = large.clamp(max=num_buckets - 1)
    return buckets + torch.where(rpos < max_exact, rpos, large)


class RelativePositionBias(nn.Module):
    def __init__(self, config, bidirectional):
        super().__init__()
        self.bidirectional = bidirectional
        self.num_buckets = config["relative_attention_num_buckets"]
        self.max_distance = config["relative_attention_max_distance"]
        self.embeddings = nn.Embedding(self.num_buckets, config["num_heads"])

    def forward(self, query_length, key_length):
        context_position = torch.arange(query_length)[:, None]
        memory_position = torch.arange(key_length)[None, :]
        relative_position = memory_position - context_position
        bucket = relative_position_bucket(
            relative_position, self.bidirectional, self.num_buckets, self.max_distance
        )
        return self.embeddings(bucket).permute(2, 0, 1)  # (heads, queries, keys)


class MultiHeadAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner_dim = config["d_kv"] * config["num_heads"]
        self.num_heads = config["num_heads"]
        self.query_proj = nn.Linear(config["d_model"], inner_dim, bias=False)
        self.key_proj = nn.Linear(config["d_model"], inner_dim, bias=False)
        self.value_proj = nn.Linear(config["d_model"], inner_dim, bias=False)
        self.out_proj = nn.Linear(inner_dim, config["d_model"], bias=False)

    def forward(self, queries, keys, values, mask):
        queries = self.query_proj(queries)
        keys = self.key_proj(keys)
        values = self.value_proj(values)

        b, length, _ = queries.shape
        _, source, _ = keys.shape
        queries = queries.reshape(b, length, self.num_heads, -1).transpose(1, 2)
        keys = keys.reshape(b, source, self.num_heads, -1).permute(0, 2, 3, 1)
        values = values.reshape(b, source, self.num_heads, -1).transpose(1, 2)

        # T5 does not scale
        scores = queries @ keys
        if mask is not None:
            scores = scores + mask
        scores = torch.softmax(scores, dim=-1)
        values_hat = (scores @ values).transpose(1, 2).reshape(b, length, -1)
        return self.out_proj(values_hat)


class RMSNorm(nn.Module):
    def __init__(self, dims, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dims))
        self.eps = eps

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class DenseActivation(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wi_0 = nn.Linear(config["d_model"], config["d_ff"], bias=False)
        self.wi_1 = nn.Linear(config["d_model"], config["d_ff"], bias=False)
        self.wo = nn.Linear(config["d_ff"], config["d_model"], bias=False)

    def forward(self, x):
        hidden_act = nn.functional.gelu(self.wi_0(x), approximate="tanh")
        return self.wo(hidden_act * self.wi_1(x))


class TransformerEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = MultiHeadAttention(config)
        self.ln1 = RMSNorm(config["d_model"])
        self.ln2 = RMSNorm(config["d_model"])
        self.dense = DenseActivation(config)

    def forward(self, x, mask):
        y = self.ln1(x)
        x = x + self.attention(y, y, y, mask)
        y = self.ln2(x)
        return x + self.dense(y)


class TransformerEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(
            [TransformerEncoderLayer(config) for _ in range(config["num_layers"])]
        )
        self.ln = RMSNorm(config["d_model"])
        self.relative_attention_bias = RelativePositionBias(config, bidirectional=True)

    def forward(self, x, padding):
        pos_bias = self.relative_attention_bias(x.shape[1], x.shape[1])
        mask = pos_bias + padding
        for layer in self.layers:
            x = layer(x, mask)
        return self.ln(x)


class TransformerDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attention = MultiHeadAttention(config)
        self.cross_attention = MultiHeadAttention(config)
        self.ln1 = RMSNorm(config["d_model"])
        self.ln2 = RMSNorm(config["d_model"])
        self.ln3 = RMSNorm(config["d_model"])
        self.dense = DenseActivation(config)

    def forward(self, x, memory, mask, memory_mask):
        y = self.ln1(x)
        x = x + self.self_attention(y, y, y, mask)
        y = self.ln2(x)
        x = x + self.cross_attention(y, memory, memory, memory_mask)
        y = self.ln3(x)
        return x + self.dense(y)


class TransformerDecoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(
            [TransformerDecoderLayer(config) for _ in range(config["num_layers"])]
        )
        self.ln = RMSNorm(config["d_model"])
        self.relative_attention_bias = RelativePositionBias(config, bidirectional=False)

    def forward(self, x, memory, padding):
        length = x.shape[1]
        causal = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        mask = causal + self.relative_attention_bias(length, length)
        memory_mask = padding
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        return self.ln(x)


class T5(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config["vocab_size"], config["d_model"])
        self.encoder = TransformerEncoder(config)
        self.decoder = TransformerDecoder(config)
        self.model_dim = config["d_model"]

    def encode(self, input_ids, padding):
        return self.encoder(self.wte(input_ids), padding)

    def decode(self, decoder_input_ids, memory, padding):
        y = self.decoder(self.wte(decoder_input_ids), memory, padding)
        y = y * self.model_dim**-0.5  # the head is tied
        return y @ self.wte.weight.T

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        padding = torch.zeros(attention_mask.shape, dtype=self.wte.weight.dtype)
        padding = padding.masked_fill(attention_mask == 0, -torch.inf)[:, None, None, :]
        memory = self.encode(input_ids, padding)
        return self.decode(decoder_input_ids, memory, padding)


SHARED = {".block.": ".layers.", ".k.": ".key_proj.", ".o.": ".out_proj."}
SHARED |= {".q.": ".query_proj.", ".v.": ".value_proj.", "final_layer_norm.": "ln."}
ENCODER = {
    ".layer.0.SelfAttention.": ".attention.",
    ".layer.0.layer_norm.": ".ln1.",
    ".layer.1.layer_norm.": ".ln2.",
    ".layer.1.DenseReluDense.": ".dense.",
}
DECODER = {
    ".layer.0.SelfAttention.": ".self_attention.",
    ".layer.0.layer_norm.": ".ln1.",
    ".layer.1.EncDecAttention.": ".cross_attention.",
    ".layer.1.layer_norm.": ".ln2.",
    ".layer.2.layer_norm.": ".ln3.",
    ".layer.2.DenseReluDense.": ".dense.",
}


def sanitize(weights):
    sanitized = {"wte.weight": weights["shared.weight"]}
    for name, weight in weights.items():
        if "embed_tokens" in name or name in ("shared.weight", "lm_head.weight"):
            continue
        if "relative_attention_bias" in name:
            stack = name.split(".")[0]
            sanitized[f"{stack}.relative_attention_bias.embeddings.weight"] = weight
            continue
        replacements = ENCODER if name.startswith("encoder.") else DECODER
        new = name
        for old, other in (SHARED | replacements).items():
            new = new.replace(old, other)
        sanitized[new] = weight
    return sanitized


def make(peer):
    _, config = PEER
    model = T5(config).to(peer.dtype)
    model.load_state_dict(sanitize(peer.state_dict()))
    return model


def inputs(generator):
    return {
        "input_ids": torch.randint(1, 71, (2, 26), generator=generator),
        "attention_mask": (torch.arange(26) < torch.tensor([26, 19])[:, None]).long(),
        "decoder_input_ids": torch.randint(1, 71, (2, 23), generator=generator),
    }
