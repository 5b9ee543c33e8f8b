"""Decoder-only models and their weights."""
