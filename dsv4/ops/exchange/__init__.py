"""The room of what ranks exchange inside a decode step; the CPU path is parallel/comm.py."""
