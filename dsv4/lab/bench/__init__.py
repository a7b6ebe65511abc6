"""Speed on a GPU: decoding, prefill, single ops; each beside the ceiling measured in the same run."""
