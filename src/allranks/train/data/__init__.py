"""Rows to token sequences: sources, templates, tokenizers, packing, a cache that many ranks may share, batches."""
