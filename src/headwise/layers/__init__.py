"""Layers as modules: the native one, torch's interface, and positions."""
