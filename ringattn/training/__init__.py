"""What training on sharded sequences needs beside attention: batches, losses, tiles, checkpoints, host memory."""
