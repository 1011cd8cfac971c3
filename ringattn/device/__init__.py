"""One device's part: attention over a set of tiles, and the streams that its launches run on."""
