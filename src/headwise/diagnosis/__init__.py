"""Questions about weights: which layout they are in, and whether two sets are one function.

weights     weights as they are given: a file, a folder or a state dict, with a config and counts
detect      `detect`: by names, shapes, config, values or a run of a model
behaviour   by a run of a model: does a layer in the layout compute what the model does?
self_attention   the self-attention of a running model, and its modules in a checkpoint
readings    the layouts of two sets of weights, side by side
tensors     tensors beside each other, byte for byte
outputs     what the layers of both give for the same inputs
result      verdicts and their evidence
verify      `verify`: all of it
"""
