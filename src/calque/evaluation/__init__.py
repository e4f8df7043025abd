"""Tasks, metrics and grids of models, tasks and seeds."""
