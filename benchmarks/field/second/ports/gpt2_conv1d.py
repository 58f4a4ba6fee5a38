"""GPT-2 with Conv1D (huggingface/transformers, src/transformers/models/gpt2/modeling_gpt2.py)."""

import torch
from torch import nn

SETTINGS = {"embed_dim": 54, "num_heads": 6, "causal": True}
TAKES = ("mask",)
N_CTX = 1024


class Conv1D(nn.Module):
    """A linear layer whose weight lies as (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = (*x.shape[:-1], self.nf)
        x = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class GPT2Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        bias = torch.tril(torch.ones(N_CTX, N_CTX, dtype=torch.bool))
        self.register_buffer("bias", bias.view(1, 1, N_CTX, N_CTX), persistent=False)
        self.embed_dim = n_embd
        self.num_heads = n_head
        self.head_dim = n_embd // n_head
        self.split_size = n_embd
        self.c_attn = Conv1D(3 * n_embd, n_embd)
        self.c_proj = Conv1D(n_embd, n_embd)

    def _split_heads(self, tensor):
        tensor = tensor.view(*tensor.shape[:-1], self.num_heads, self.head_dim)
        return tensor.permute(0, 2, 1, 3)  # batch, head, token, head_dim

    def _merge_heads(self, tensor):
        tensor = tensor.permute(0, 2, 1, 3).contiguous()
        return tensor.view(*tensor.shape[:-2], self.num_heads * self.head_dim)

    def _attn(self, query, key, value, attention_mask=None):
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / value.size(-1) ** 0.5
        query_length, key_length = query.size(-2), key.size(-2)
        causal_mask = self.bias[:, :, key_length - query_length : key_length, :key_length]
        mask_value = torch.finfo(attn_weights.dtype).min
        attn_weights = torch.where(causal_mask, attn_weights, mask_value)
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        return torch.matmul(attn_weights, value)

    def forward(self, hidden_states, mask=None):
        if mask is not None:
            mask = mask.to(hidden_states.dtype)
            mask = (1.0 - mask) * torch.finfo(hidden_states.dtype).min
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query = self._split_heads(query)
        key = self._split_heads(key)
        value = self._split_heads(value)
        attn_output = self._attn(query, key, value, mask)
        attn_output = self._merge_heads(attn_output)
        return self.c_proj(attn_output)


def make(weights):
    attn = GPT2Attention(SETTINGS["embed_dim"], SETTINGS["num_heads"])
    kernel = torch.cat([weights["wq"], weights["wk"], weights["wv"]], dim=0)
    bias = torch.cat([weights["bq"], weights["bk"], weights["bv"]])
    attn.c_attn.weight.data = kernel.t().contiguous()
    attn.c_attn.bias.data = bias
    attn.c_proj.weight.data = weights["wo"].t().contiguous()
    attn.c_proj.bias.data = weights["bo"].clone()
    return attn.eval()
