"""From strings to packed batches of token ids.

`tokenizer`, `vocabularies` and `words` encode text; `windows` splits what is too long. `prepare`
and `linked` write tokenized corpora into a `store`; `sampling` and `streams` draw batches from
them; `ragged`, `layout` and `masking` build the batches.
"""
