"""The embedded model: a tiny trained DeepSeek-V4 shipped with the package. Knows where it lies, no more."""

from pathlib import Path

from dsv4.errors import CheckpointError

EMBEDDED = Path(__file__).parent / "tiny"


def embedded() -> Path:
    """The folder of the embedded model, or one sentence if the installation lacks it."""
    _check("the embedded model", ("config.json", "model.safetensors", "tokenizer.json"), "a model folder")
    return EMBEDDED


def evaluation_set() -> Path:
    """The prompts that the embedded model is measured with."""
    _check("the evaluation set", ("evalset.jsonl",), "one with --set")
    return EMBEDDED / "evalset.jsonl"


def _check(what: str, files: tuple[str, ...], instead: str) -> None:
    if missing := [name for name in files if not (EMBEDDED / name).is_file()]:
        raise CheckpointError(
            f"{what} is missing from this installation ({EMBEDDED} lacks {', '.join(missing)}); "
            f"install dsv4 again, or name {instead}"
        )
