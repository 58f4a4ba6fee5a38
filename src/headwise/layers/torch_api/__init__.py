"""Drop-in for torch.nn.MultiheadAttention, with its signature, parameters and conventions."""
