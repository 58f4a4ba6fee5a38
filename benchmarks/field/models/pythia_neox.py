"""Pythia in the layout of GPT-NeoX: EleutherAI/gpt-neox, megatron/model/transformer.py.

`GPTNeoX.forward(input_ids)` takes token ids of (batch, tokens) and returns logits. Inside,
tokens come first: (tokens, batch, width).
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

PEER = (
    "GPTNeoXForCausalLM",
    {
        "vocab_size": 71,
        "hidden_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "intermediate_size": 108,
        "max_position_embeddings": 48,
        "initializer_range": 0.18,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.375,
        },
    },
)


class NeoXArgs:
    hidden_size = 80
    num_attention_heads = 5
    num_layers = 4
    ffn = 108
    vocab_size = 71
    rotary_pct = 0.375
    rotary_emb_base = 10000
    layernorm_epsilon = 1e-5


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, seq_len):
        t = torch.arange(seq_len).float()
        freqs = torch.einsum("i,j->ij", t, self.inv_freq.float())
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos()[:, None, None, :], emb.sin()[:, None, None, :]


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class ParallelSelfAttention(nn.Module):
    def __init__(self, args, layer_number):
        super().__init__()
        self.layer_number = layer_number
        self.num_attention_heads = args.num_attention_heads
        self.hidden_size_per_attention_head = args.hidden_size // args.num_attention_heads
        self.rotary_ndims = int(self.hidden_size_per_attention_head * args.rotary_pct)
        self.rotary_emb = RotaryEmbedding(self.rotary_ndims, base=args.rotary_emb_base)
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)
        self.query_key_value = nn.Linear(args.hidden_size, 3 * args.hidden_size)
        self.dense = nn.Linear(args.hidden_size, args.hidden_size)

    def attention(self, query_layer, key_layer, value_layer, attention_mask):
        sq, b, heads, hn = query_layer.shape
        sk = key_layer.shape[0]
        # [s, b, heads, hn] -> [s, b * heads, hn]
        query_layer = query_layer.reshape(sq, b * heads, hn)
        key_layer = key_layer.reshape(sk, b * heads, hn)
        matmul_result = torch.bmm(query_layer.transpose(0, 1), key_layer.permute(1, 2, 0))
        attention_scores = (matmul_result / self.norm_factor).view(b, heads, sq, sk)

        attention_scores = attention_scores.masked_fill(attention_mask, -10000.0)
        attention_probs = F.softmax(attention_scores, dim=-1)

        value_layer = value_layer.reshape(sk, b * heads, hn)
        attention_probs = attention_probs.view(b * heads, sq, sk)
        context_layer = torch.bmm(attention_probs, value_layer.transpose(0, 1))
        # [b * heads, sq, hn] -> [sq, b, hidden]
        context_layer = context_layer.view(b, heads, sq, hn).permute(2, 0, 1, 3)
        return context_layer.reshape(sq, b, heads * hn)

    def forward(self, hidden_states, attention_mask):
        s, b, _ = hidden_states.shape
        hn = self.hidden_size_per_attention_head
        # [s, b, hidden] -> [s, b, heads, 3 * hn]: each head's own q, k and v lie together
        mixed_x_layer = self.query_key_value(hidden_states)
        mixed_x_layer = mixed_x_layer.view(s, b, self.num_attention_heads, 3 * hn)
        query_layer, key_layer, value_layer = mixed_x_layer.chunk(3, dim=-1)

        n = self.rotary_ndims
        query_rot, query_pass = query_layer[..., :n], query_layer[..., n:]
        key_rot, key_pass = key_layer[..., :n], key_layer[..., n:]
        cos, sin = self.rotary_emb(s)
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query_layer = torch.cat((query_rot, query_pass), dim=-1)
        key_layer = torch.cat((key_rot, key_pass), dim=-1)

        context_layer = self.attention(query_layer, key_layer, value_layer, attention_mask)
        return self.dense(context_layer)


class ParallelMLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(args.hidden_size, args.ffn)
        self.dense_4h_to_h = nn.Linear(args.ffn, args.hidden_size)

    def forward(self, hidden_states):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden_states)))


class ParallelTransformerLayer(nn.Module):
    def __init__(self, args, layer_number):
        super().__init__()
        eps = args.layernorm_epsilon
        self.input_layernorm = nn.LayerNorm(args.hidden_size, eps=eps)
        self.attention = ParallelSelfAttention(args, layer_number)
        self.post_attention_layernorm = nn.LayerNorm(args.hidden_size, eps=eps)
        self.mlp = ParallelMLP(args)

    def forward(self, x, attention_mask):
        # x = x + attn(ln1(x)) + mlp(ln2(x))
        residual = x
        attention_output = self.attention(self.input_layernorm(x), attention_mask)
        mlp_output = self.mlp(self.post_attention_layernorm(x))
        return residual + mlp_output + attention_output


class GPTNeoX(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList(
            [ParallelTransformerLayer(args, i) for i in range(args.num_layers)]
        )
        self.norm = nn.LayerNorm(args.hidden_size, eps=args.layernorm_epsilon)
        self.final_linear = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def forward(self, input_ids):
        s = input_ids.shape[1]
        x = self.word_embeddings(input_ids).transpose(0, 1).contiguous()
        attention_mask = torch.ones(s, s).tril()[None, None] < 0.5
        for layer in self.layers:
            x = layer(x, attention_mask)
        x = self.norm(x).transpose(0, 1)
        return self.final_linear(x)


def make(peer):
    model = GPTNeoX(NeoXArgs()).to(peer.dtype)
    state = {}
    for name, tensor in peer.state_dict().items():
        key = name.removeprefix("gpt_neox.").replace("embed_in.", "word_embeddings.")
        key = key.replace("final_layer_norm.", "norm.").replace("lm_head.", "final_linear.")
        state[key] = tensor.clone()
    model.load_state_dict(state)
    return model


def inputs(generator):
    return {"input_ids": torch.randint(0, 71, (3, 20), generator=generator)}
