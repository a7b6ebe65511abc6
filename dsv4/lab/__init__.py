"""What an engineer uses around the engine: score, inspect, make checkpoints. Never imported by the engine."""
