"""MetaXLM: a cross-lingual model that starts from a monolingual one.

`match` finds the rows that initialize each other, `initialize` builds the weights, and `grow` has
the public function that writes the new model.
"""
