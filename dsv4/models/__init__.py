"""The embedded model: a tiny trained DeepSeek-V4 shipped with the package. Knows where it lies, no more."""

from pathlib import Path

from dsv4.errors import CheckpointError

EMBEDDED = Path(__file__).parent / "tiny"


def embedded() -> Path:
    """The folder of the embedded model, or one sentence if the installation lacks it."""
    files = ("config.json", "model.safetensors", "tokenizer.json")
    if missing := [name for name in files if not (EMBEDDED / name).is_file()]:
        raise CheckpointError(
            f"the embedded model is missing from this installation ({EMBEDDED} lacks {', '.join(missing)}); "
            "install dsv4 again, or name a model folder"
        )
    return EMBEDDED
