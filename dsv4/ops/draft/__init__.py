"""Drafts and their verification on a GPU: launches that only speculation needs."""
