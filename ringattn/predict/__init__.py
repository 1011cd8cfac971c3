"""Predicts time, communication and memory of every schedule on many GPUs."""
