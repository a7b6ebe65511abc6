"""A tokenizer of single bytes with V4's special tokens, so that a random checkpoint can be talked to."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# In the order of their ids; ordinary bytes follow. BOS 0, EOS 1 and padding 2 as in the published vocabulary.
SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)
MIN_VOCABULARY = len(SPECIALS) + 256


def byte_tokenizer_json(vocab_size: int) -> str:
    """Ids beyond the bytes are placeholders, as in the published vocabulary: every id has a text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    holders = tuple(f"<｜place▁holder▁no▁{n}｜>" for n in range(vocab_size - MIN_VOCABULARY))
    vocabulary = {name: id for id, name in enumerate((*SPECIALS, *symbols, *holders))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (*SPECIALS, *holders)]
    )
    return tokenizer.to_str(pretty=True)
