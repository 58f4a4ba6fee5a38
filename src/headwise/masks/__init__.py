"""Masks and score biases."""
