"""Outputs of a function: what they show of its weights, by inputs that are made for it."""
