"""Entry points for other libraries. The modules of one library do not import those of another."""
