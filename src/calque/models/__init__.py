"""Everything with weights: encoders, heads, loading and saving."""
