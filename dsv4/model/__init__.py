"""The DeepSeek-V4 graph, built from ops and weights. Knows nothing of requests, files or text."""
