"""The room of the op `sample`; `cpu.py` is the contract."""
