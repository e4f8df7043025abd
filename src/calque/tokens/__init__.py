"""From strings to packed batches of token ids."""
