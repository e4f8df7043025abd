"""Translation with encoder-decoder models, and attention between two sentences."""
