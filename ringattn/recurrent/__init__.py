"""Layers whose memory is a state, on the same shards as attention: linear attention and short convolutions."""
