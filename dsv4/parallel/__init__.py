"""Several ranks that run one model: who they are (mesh), what they tell each other (comm, channel)."""
