"""How the embedded tiny model is made: tokenizer, data, training, export. Imports dsv4, never the reverse."""
