"""What people use aligned models for: one verb a file."""
