"""A decode step as data: what is computed (launches), how it overlaps (schedule), and the ways to run it."""
