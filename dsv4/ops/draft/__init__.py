"""The room of DSpark's drafts inside a decode step; the CPU path is model/dspark.py."""
