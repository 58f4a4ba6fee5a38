"""Attention on a sequence whose tokens are divided over ranks."""
