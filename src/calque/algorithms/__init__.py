"""Functions from arrays to arrays; they know neither text nor models."""
