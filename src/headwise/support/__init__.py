"""Helpers for all packages: axes, messages, integers, tracing, extras, torch's private names."""
