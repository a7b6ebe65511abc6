"""Does tokenizer.json belong to the model?"""

from pathlib import Path

from dsv4.config import ModelConfig
from dsv4.errors import TextError
from dsv4.lab.doctor.findings import Finding, first_of
from dsv4.text.tokenizer import V4_VOCAB_SIZE, Tokenizer

_FETCH = "put the tokenizer.json of this very model into its folder"
# A vocabulary may be padded to a round number of rows, but not by more.
PADDING = 0.05


def examine_tokenizer(folder: Path, config: ModelConfig) -> Finding:
    def found(level: str, text: str, remedy: str = "") -> Finding:
        return Finding("checkpoint", "tokenizer", level, text, remedy)  # type: ignore[arg-type]

    if not (folder / "tokenizer.json").exists():
        return found("note", "there is no tokenizer.json: only token ids can be used")
    try:
        tokenizer = Tokenizer.load(folder)
    except TextError as error:
        return found("fail", str(error), _FETCH)
    if config.vocab_size == V4_VOCAB_SIZE:
        if problems := tokenizer.check_v4_ids():
            return found("fail", f"not DeepSeek-V4's: {first_of(problems)}", _FETCH)
        return found("ok", f"{tokenizer.vocab_size:,} ids, special tokens and self-test as published")
    ids = f"tokenizer.json has {tokenizer.vocab_size:,} ids, the model {config.vocab_size:,} rows"
    if not (1 - PADDING) * config.vocab_size <= tokenizer.vocab_size <= config.vocab_size:
        return found("fail", f"of another model: {ids}", _FETCH)
    for what, has, wants in (
        ("start", tokenizer.bos_id, config.bos_id),
        ("end", tokenizer.eos_id, config.eos_id),
    ):
        if has != wants:
            return found(
                "fail", f"of another model: its {what} token is {has}, config.json says {wants}", _FETCH
            )
    return found("ok", f"{ids}; start and end tokens agree with config.json")
