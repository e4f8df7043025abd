"""Measuring models on data sets."""
