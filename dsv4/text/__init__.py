"""Messages to token ids, token ids to text, reasoning and function calls. Knows nothing of tensors."""
