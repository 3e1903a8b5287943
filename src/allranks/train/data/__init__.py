"""Turn rows into token sequences and batches: tokenizers, packing, and a cache that ranks share."""
