"""Decoding: keys and values of many sequences in pages on all ranks, and attention of the newest tokens to them."""
