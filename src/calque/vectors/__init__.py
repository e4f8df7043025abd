"""Static word vectors: extraction, mapping to one space, bilingual lexicons."""
