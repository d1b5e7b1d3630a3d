"""Tokenizers of transformers, from a local folder, as the job's data takes them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

_FOLDER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*", "*.model",
)  # fmt: skip


class FolderTokenizer:
    """A tokenizer of transformers, from its folder; with a chat template it joins messages too.

    No special tokens are added, and those spelled out in a text are encoded as plain text.
    """

    def __init__(self, folder: Path, end_of_document: str | None = None) -> None:
        """Read the folder, without a network.

        Args:
            folder: As ``save_pretrained`` writes it.
            end_of_document: The token that ends a document; None: the tokenizer's end of text (``eos_token``).

        Raises:
            ValueError: If it holds no tokenizer, or one without such a token.
        """
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # of many kinds
            raise ValueError(f"{folder} holds no tokenizer: {' '.join(str(error).split())[:200]}") from error
        self._folder = folder
        self._tokenizer.model_max_length = 1 << 60  # documents are cut into rows later
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        end = self._tokenizer.eos_token if end_of_document is None else end_of_document
        if end is None or end not in vocabulary:
            raise ValueError(
                f"the tokenizer in {folder} has no {'end-of-text token' if end is None else repr(end)} to end a "
                "document with; set data.end_of_document to one of its tokens"
            )
        self.end_of_document = vocabulary[end]
        digest = hashlib.sha256()
        for path in sorted({path for pattern in _FOLDER_FILES for path in folder.glob(pattern) if path.is_file()}):
            digest.update(path.name.encode() + path.read_bytes())
        self.fingerprint = f"folder:{digest.hexdigest()}:{self.end_of_document}"

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Return the ids, int32."""
        ids = self._tokenizer(text.decode("utf-8"), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def encode_messages(self, messages: list[Any]) -> NDArray[np.integer]:
        """Return the ids of a conversation, int32.

        Raises:
            ValueError: If there is no template, or it refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer in {self._folder} has no chat template, which joins messages; use one that has, or a "
                "data.column of text"
            )
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # of jinja
            raise ValueError(f"the chat template of {self._folder} refuses a conversation: {error}") from error
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Return the text, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)
