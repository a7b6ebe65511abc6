"""`python -m dsv4.spec MODEL --ids IDS --logits OUT`: the reference's logits (lab/reference.py)."""

from dsv4.lab.reference import main

main()
