"""The command line: one small module per command. Parses, shows, and calls; computes nothing itself."""
