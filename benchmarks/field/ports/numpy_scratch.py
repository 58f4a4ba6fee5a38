"""A transformer from scratch in NumPy (AkiRusProd/numpy-transformer, transformer/layers/combined/self_attention.py)."""  # noqa: E501
# ruff: noqa: N803, N806

import numpy as np

SETTINGS = {"embed_dim": 55, "num_heads": 5, "causal": True, "bias": ""}
TAKES = ("mask",)
NUMPY = True


class Dense:
    """y = x W, with the inputs along the rows of W."""

    def __init__(self, units_num, inputs_num):
        self.w = np.zeros((inputs_num, units_num))

    def forward(self, X):
        return np.dot(X, self.w)


class Softmax:
    def forward(self, x):
        e_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return e_x / np.sum(e_x, axis=-1, keepdims=True)


class MultiHeadAttention:
    """Multi-Head Attention with separate layers for queries, keys and values."""

    def __init__(self, d_model=512, heads_num=8):
        self.d_model = d_model
        self.heads_num = heads_num
        self.d_k = self.d_q = self.d_v = d_model // heads_num
        self.scale = np.sqrt(self.d_k)

        self.K_linear = Dense(self.d_k * heads_num, d_model)
        self.Q_linear = Dense(self.d_q * heads_num, d_model)
        self.V_linear = Dense(self.d_v * heads_num, d_model)
        self.O_linear = Dense(d_model, self.d_v * heads_num)
        self.activation = Softmax()

    def split_heads_forward(self, x):
        batch_size = x.shape[0]
        return x.reshape(batch_size, -1, self.heads_num, self.d_k).transpose(0, 2, 1, 3)

    def group_heads_forward(self, x):
        batch_size = x.shape[0]
        return x.transpose(0, 2, 1, 3).reshape(batch_size, -1, self.heads_num * self.d_k)

    def forward(self, query, key, value, mask=None):
        K = self.split_heads_forward(self.K_linear.forward(key))
        Q = self.split_heads_forward(self.Q_linear.forward(query))
        V = self.split_heads_forward(self.V_linear.forward(value))

        energy = np.matmul(Q, K.transpose(0, 1, 3, 2)) / self.scale
        if mask is not None:
            energy = np.where(mask == 0, float("-inf"), energy)
        attention = self.activation.forward(energy)

        output = np.matmul(attention, V)
        return self.O_linear.forward(self.group_heads_forward(output))


def get_pad_mask(x, mask):
    if mask is None:
        return np.ones((x.shape[0], 1, 1, x.shape[1]), dtype=int)
    return mask.astype(int)


def get_sub_mask(x):
    """1 on and below the diagonal."""
    seq_len = x.shape[1]
    return np.logical_not(np.triu(np.ones((seq_len, seq_len)), k=1)).astype(int)


def make(weights):
    layer = MultiHeadAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"])
    layer.Q_linear.w = weights["wq"].T
    layer.K_linear.w = weights["wk"].T
    layer.V_linear.w = weights["wv"].T
    layer.O_linear.w = weights["wo"].T

    def port(x, mask=None):
        mask = get_pad_mask(x, mask) & get_sub_mask(x)
        return layer.forward(x, x, x, mask)

    return port
