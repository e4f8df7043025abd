"""From a recipe to a checkpoint."""
