"""The tokenizer of small checkpoints: a word a token, `<end>` (id 1) ends a response."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def tokenizer_files(vocab_size: int, **settings: Any) -> dict[str, str]:
    """Text by file name; `settings` go into tokenizer_config.json."""
    vocab = {"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings)}
