"""Sentence vectors, bitext mining and language-neutral spaces."""
