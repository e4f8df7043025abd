"""Fine-tuning an encoder for a task and testing it in other languages."""
