"""The server: an OpenAI-compatible endpoint in one process, the engine in another. Needs `dsv4[serve]`."""
