"""Entry points for other libraries. One library a file; no file here imports another library's."""
