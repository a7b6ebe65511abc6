"""The room of drafts inside a decode step: DSpark's own launches, and those of a round of speculation."""
