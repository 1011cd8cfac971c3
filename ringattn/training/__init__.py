"""What training on sharded sequences needs besides attention: batches, losses, tiles, checkpoints, host memory."""
