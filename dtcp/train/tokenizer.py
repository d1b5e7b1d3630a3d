"""Text to token ids: bytes as they are, or a Hugging Face ``tokenizer.json`` or folder."""

import hashlib
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """What the data needs of a tokenizer.

    Attributes:
        fingerprint: Equal for tokenizers that encode alike; goes into the dataset's state.
        vocab_size: All ids are below it. The model's ``vocab_size`` has to be at least this.
        end_of_document: Id that follows every document and that no text encodes to.
    """

    fingerprint: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Return the ids of one document, without ``end_of_document``.

        Raises:
            UnicodeDecodeError: If the tokenizer reads characters and ``text`` is not UTF-8.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Return readable text for ids of this tokenizer."""
        ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """One that joins messages by a template."""

    def encode_messages(self, messages: list[Any]) -> NDArray[np.integer]:
        """Return the ids of a conversation, a list of mappings with role and content, without ``end_of_document``."""
        ...


class ByteTokenizer:
    """A token per byte: any file is valid, ids 0 to 255; 256 ends a document.

    ``vocab_size`` is 257, unpadded: the tiny models round theirs up to 264, and logits of ids that never occur only
    learn to be small.
    """

    fingerprint = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Return the bytes, uint8."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Return the text; bytes that are not UTF-8 and the end of a document become replacement characters."""
        return b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, read by the ``tokenizers`` package.

    Truncation and padding that the file asks for are switched off, no special tokens are added, and special tokens
    spelled out in a text are encoded as plain text.
    """

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        """Read the file.

        Args:
            path: Of the ``tokenizer.json``.
            end_of_document: The token that ends a document; None: the first of ``END_OF_DOCUMENT_NAMES`` it has.

        Raises:
            ValueError: If the file is missing or no tokenizer, or has no such token.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise ValueError(
                f"tokenizer must be 'bytes' or the path of a Hugging Face tokenizer.json or of its folder, got "
                f"{str(path)!r}, which is {'a folder' if path.is_dir() else 'not a file'}"
            )
        try:
            from tokenizers import Tokenizer as HFTokenizer
        except ImportError as error:
            raise ValueError(f"tokenizer={str(path)!r} needs the tokenizers package; pip install tokenizers") from error
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for a bad file
            raise ValueError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.end_of_document = vocabulary[_find_end(vocabulary, end_of_document, path)]
        self.fingerprint = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}:{self.end_of_document}"

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Return the ids, int32."""
        return np.asarray(self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Return the text, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def make_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """Return the tokenizer called ``name``: "bytes", or the path of a Hugging Face ``tokenizer.json`` or its folder.

    Raises:
        ValueError: If there is no such tokenizer, or it has no end-of-document token.
    """
    if name != "bytes":
        path = Path(name).expanduser()
        # A folder with the file alone says nothing that transformers needs.
        if path.is_dir() and any((path / file).is_file() for file in ("tokenizer_config.json", "config.json")):
            try:
                from dtcp.integrations.transformers_tokenizer import FolderTokenizer
            except ImportError as error:
                raise ValueError(f"tokenizer={name!r} needs transformers; pip install 'dtcp[hf]'") from error
            return FolderTokenizer(path, end_of_document)
        return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_of_document)
    if end_of_document is not None:
        raise ValueError(
            f"tokenizer=bytes ends documents with id 256, got end_of_document={end_of_document!r}; leave it out"
        )
    return ByteTokenizer()


def _find_end(vocabulary: dict[str, int], wanted: str | None, path: Path) -> str:
    for name in END_OF_DOCUMENT_NAMES if wanted is None else (wanted,):
        if name in vocabulary:
            return name
    sought = f"none of {', '.join(END_OF_DOCUMENT_NAMES)}" if wanted is None else f"no {wanted!r}"
    special = [name for name in vocabulary if name.startswith("<")][:10]
    raise ValueError(
        f"{path} has {sought} to end a document with; set end_of_document to one of its tokens"
        + (f", such as {', '.join(special)}" if special else "")
    )
