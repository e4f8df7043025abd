"""One module per task."""
