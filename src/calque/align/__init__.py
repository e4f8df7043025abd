"""Arrays in, arrays out: the mathematics of alignment; knows no text and no model."""
