"""Small trained encoders to look at: one from a package, one trained on the spot.

A model is read once; what its attention layers were given, and gave, comes back as a `Reading`.
"""
