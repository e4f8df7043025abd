"""MetaXLM: a multilingual model that starts from a monolingual one."""
