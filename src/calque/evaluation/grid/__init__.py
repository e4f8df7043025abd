"""Grids of models, tasks and seeds; finished runs are not repeated."""
