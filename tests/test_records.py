"""Documents from records: JSON lines, text and parquet give the same tokens; kept, resumed, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtcp.train.data import DataConfig, make_dataset
from dtcp.train.records import read_records
from dtcp.train.tokenizer import ByteTokenizer, ChatTokenizer, make_tokenizer
from hf_job import config_folder, job
from resuming import run_job, saved

TEXTS = [f"document {i}: " + "a word " * (3 + i % 7) for i in range(200)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records_of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"id": i, "text": text} for i, text in enumerate(texts)]


def corpus_of(tmp_path: Path, *paths: Path, tokenizer: Any = None, **options: Any) -> Any:
    given = {"format": None, "column": None, "cache": tmp_path / "cache", "max_bytes": None} | options
    return read_records([str(path) for path in paths], tokenizer or ByteTokenizer(), **given)


def expected(texts: list[str]) -> list[int]:
    return [i for text in texts for i in (*text.encode(), 256)]


def test_every_format_gives_the_documents_in_order(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    lines = write_json(tmp_path / "a.jsonl", records_of(TEXTS))
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    parquet.write_table(pa.Table.from_pylist(records_of(TEXTS)), tmp_path / "a.parquet", row_group_size=16)
    for path in (lines, tmp_path / "a.txt", tmp_path / "a.parquet"):
        corpus = corpus_of(tmp_path, path)
        assert isinstance(corpus.tokens, np.memmap)  # not in memory
        assert corpus.tokens.tolist() == expected(TEXTS), path
        assert corpus.document_starts.tolist()[:3] == [0, len(TEXTS[0]) + 1, len(TEXTS[0]) + len(TEXTS[1]) + 2]
        assert corpus.digest == type(corpus)("", corpus.tokens, corpus.document_starts).digest


def test_tokens_are_kept_and_made_anew_when_a_file_changes(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a.jsonl", [*records_of(TEXTS), {"id": 0, "text": ""}, {"id": 1, "text": None}])
    first = corpus_of(tmp_path, path)
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *args: pytest.fail("tokenized again"))
    assert corpus_of(tmp_path, path).tokens.tolist() == first.tokens.tolist() == expected(TEXTS)
    monkeypatch.undo()
    write_json(path, records_of(TEXTS[:5]))
    assert corpus_of(tmp_path, path).tokens.tolist() == expected(TEXTS[:5])
    assert corpus_of(tmp_path, path, max_bytes=1).tokens.tolist() == expected(TEXTS[:1])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"body": "x", "id": 1}],
            {},
            r"a.jsonl has none of text, messages among its columns, which are body, id",
        ),
        ([{"text": "x", "id": 1}], {"column": "body"}, r"no 'body' among its columns, which are text, id"),
        ([{"text": 3}], {}, r"record 1 of .*a.jsonl has a int where text is to be"),
        (
            [{"messages": [{"role": "user", "content": "x"}]}],
            {},
            r"only a tokenizer with a chat template",
        ),
        ([], {}, r"a.jsonl has no records; put some in it"),
        ([{"text": ""}, {"text": ""}], {}, r"no record of .*a.jsonl has text in it"),
        ([{"text": "x"}], {"format": "csv"}, r"data.format must be one of json, parquet, text or null, got 'csv'"),
        ([{"text": "x"}], {"format": "parquet"}, r"a.jsonl cannot be read as parquet"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path, rows, options, message):
    path = write_json(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        corpus_of(tmp_path, path, **options)
    assert not list((tmp_path / "cache").glob("*/tokens.json")), "half of it is not taken for all"


def test_missing_files_and_files_of_several_formats_are_refused(tmp_path):
    path = write_json(tmp_path / "a.jsonl", records_of(TEXTS))
    with pytest.raises(ValueError, match=r"there is no file .*b.jsonl"):
        corpus_of(tmp_path, tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"data source hf needs a list of files"):
        corpus_of(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"several formats: .*a.jsonl \(json\).*a.txt \(text\)"):
        corpus_of(tmp_path, path, tmp_path / "a.txt")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"a.csv ends like none of .json, .jsonl"):
        corpus_of(tmp_path, tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"b.jsonl cannot be read as json"):
        corpus_of(tmp_path, tmp_path / "b.jsonl")
    for name in ("format", "column"):
        with pytest.raises(ValueError, match=f"data.{name} is for data=hf, got 'x'"):
            DataConfig(**{name: "x"})


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer_folder(folder: Path, *, end: str | None = "<|im_end|>", template: str | None = TEMPLATE) -> Path:
    """Of words, as transformers writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({*" ".join(TEXTS).split(), "document", ":", "user", "hello", "you", "assistant"})
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "<|im_start|>", "<|im_end|>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token=end, **special)
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def test_messages_are_joined_by_the_template_of_the_folder(tmp_path):
    tokenizer = make_tokenizer(str(tokenizer_folder(tmp_path / "words")))
    assert isinstance(tokenizer, ChatTokenizer)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    corpus = corpus_of(tmp_path, write_json(tmp_path / "a.jsonl", [{"messages": turns}] * 3), tokenizer=tokenizer)
    one = tokenizer.encode_messages(turns).tolist()
    assert corpus.tokens.tolist() == [*one, tokenizer.end_of_document] * 3
    text = "<|im_start|> user hello <|im_end|> <|im_start|> assistant you <|im_end|>"
    assert " ".join(tokenizer.decode(one).split()) == text
    # Spelled out in a text, a special token is text.
    assert tokenizer.end_of_document not in tokenizer.encode(b"a word <|im_end|>").tolist()


def test_folders_without_an_end_or_a_template_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no end-of-text token to end a document with; set data.end_of_document"):
        make_tokenizer(str(tokenizer_folder(tmp_path / "endless", end=None)))
    assert make_tokenizer(str(tmp_path / "endless"), "<|im_start|>").end_of_document == 1
    tokenizer = make_tokenizer(str(tokenizer_folder(tmp_path / "silent", template=None)))
    with pytest.raises(ValueError, match=r"has no chat template"):
        tokenizer.encode_messages([{"role": "user", "content": "x"}])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"empty holds no tokenizer"):
        make_tokenizer(str(tmp_path / "empty"))


# ---- in a job --------------------------------------------------------------------------------------------------------


def test_rows_of_packed_documents_know_where_those_lie(tmp_path):
    path = write_json(tmp_path / "a.jsonl", records_of(TEXTS))
    config = DataConfig("hf", [str(path)], pack_documents=True, validation_fraction=0.1, cache=str(tmp_path / "cache"))
    dataset = make_dataset(config, seq_len=97)
    batch = dataset.batch(0, [0, 1], 2)
    ends = batch["tokens"] == 256
    assert ends.any()
    assert (batch["labels"][ends] == -100).all()
    assert (batch["positions"][:, 1:][ends[:, :-1]] == 0).all()
    assert dataset.with_split("validation").num_windows > 0


@pytest.mark.slow
def test_a_job_of_records_resumes_bitwise_and_on_another_mesh(ranks, tmp_path):
    path = write_json(tmp_path / "a.jsonl", records_of(TEXTS))
    words = tokenizer_folder(tmp_path / "words")
    data = ["data=hf", f"data.paths=[{path}]", f"data.tokenizer={words}", f"data.cache={tmp_path / 'cache'}"]
    base = job(config_folder("llama", tmp_path / "config"), "llama", True)
    base += [*data, "training.seq_len=33", "training.steps=6", "evaluation.every=2", "data.validation_fraction=0.1"]
    whole = ranks.run(2, run_job, [*base, "mesh.cp=2", *saved(tmp_path, "whole")], timeout=200)[0]
    for name in ("same", "other"):
        ranks.run(2, run_job, [*base, "mesh.cp=2", *saved(tmp_path, name)], 4, timeout=200)
    same = ranks.run(2, run_job, [*base, "mesh.cp=2", *saved(tmp_path, "same")], timeout=200)[0]
    assert same.losses == whole.losses[4:]
    mesh = ["mesh.cp=2", "mesh.dp_shard=2"]
    other = ranks.run(4, run_job, [*base, *mesh, *saved(tmp_path, "other")], timeout=200)[0]
    assert other.losses == pytest.approx(whole.losses[4:], rel=1e-5)
    one = ranks.run(1, run_job, [*base, *saved(tmp_path, "one")], timeout=200)[0]
    assert one.losses == pytest.approx(whole.losses, rel=1e-5)
