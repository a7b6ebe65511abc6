"""The room of the op `rows`; `cpu.py` is the contract."""
