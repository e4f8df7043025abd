"""Strings in, batches of token ids out; knows no model."""
