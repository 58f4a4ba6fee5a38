"""Questions about weights: which layout they are in, and whether two sets are one function.

candidates  the layouts that names and shapes allow, and the damage in the others
detection   which of them weights may be in: the answer, in words and as JSON
detect      `detect`: weights as they are given, decided by config, values or a run of a model
behaviour   by a run of a model: does a layer in the layout compute what the model does?
result      verdicts and their evidence
tensors     two sets of tensors byte for byte, and what their layers give for the same inputs
verify      `verify`: the layouts of two sets of weights side by side, and all of it
"""
