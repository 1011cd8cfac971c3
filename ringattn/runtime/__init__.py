"""What happens in a call: the operators, the ranks' agreement, and the passes that run a rank's program."""
