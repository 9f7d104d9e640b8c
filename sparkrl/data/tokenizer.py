"""The checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkrl.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a checkpoint's weights; nothing is downloaded and no code of it is run.

    Args:
        model_path: folder of the checkpoint.
    Raises:
        CheckpointError: no such folder, no readable tokenizer in it, or one without a chat template.
    """
    from transformers import AutoTokenizer

    folder = Path(model_path)
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint folder at {folder}", hint="set `model.path` to the folder that holds config.json"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CheckpointError(
            f"no tokenizer in {folder}: expected tokenizer.json and tokenizer_config.json",
            hint="copy the tokenizer files of the published model beside its weights",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types for a damaged tokenizer
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}") from error
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"the tokenizer in {folder} has no chat template, so prompts cannot be rendered",
            hint="add chat_template.jinja, or `chat_template` in tokenizer_config.json",
        )
    return tokenizer
