"""Functions from arrays to arrays; they depend on neither text nor models."""
