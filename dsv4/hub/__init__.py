"""Models by name: finds them in the local hub cache, fetches them from the hub. No torch, no weights."""
