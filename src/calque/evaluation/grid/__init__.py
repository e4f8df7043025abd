"""Grids of models, tasks and seeds, resumable cell by cell."""
