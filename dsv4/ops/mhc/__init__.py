"""The room of the op `mhc`; `cpu.py` is the contract."""
