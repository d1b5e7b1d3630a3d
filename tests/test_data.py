"""The data: rows are a function of (seed, step, row), each comes once an epoch, and bad files are named."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtcp.train.corpus import Corpus, read_corpus, stdlib_files, text_files
from dtcp.train.data import DataConfig, TextDataset, deal_rows, make_dataset, shuffled
from dtcp.train.tokenizer import ByteTokenizer, FileTokenizer, make_tokenizer


def counting_dataset(num_tokens: int, seq_len: int, **options: object) -> TextDataset:
    """A dataset whose token i is i, so that a row's tokens say where they are from."""
    corpus = Corpus("counting", np.arange(num_tokens, dtype=np.int32), np.array([0], dtype=np.int64))
    return TextDataset(corpus, ByteTokenizer(), seq_len=seq_len, **{"validation_fraction": 0.0, **options})


def text_dataset(paths: list[Path], seq_len: int = 4, **fields: object) -> TextDataset:
    config = DataConfig("text", [str(path) for path in paths], **{"validation_fraction": 0.0, **fields})
    return make_dataset(config, seq_len=seq_len)


# ---- rows ------------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 40)


@given(num_windows=sizes, seq_len=st.integers(1, 9), left_over=st.integers(0, 8), batch=st.integers(1, 12), seed=sizes)
def test_every_window_comes_once_an_epoch(
    num_windows: int, seq_len: int, left_over: int, batch: int, seed: int
) -> None:
    dataset = counting_dataset(num_windows * seq_len + 1 + left_over % seq_len, seq_len, seed=seed)
    assert dataset.num_windows == num_windows
    num_epochs = 3
    rows = [dataset.row(n // batch, n % batch, batch).tolist() for n in range(num_epochs * num_windows)]
    for epoch in range(num_epochs):
        firsts = [row[0] for row in rows[epoch * num_windows : (epoch + 1) * num_windows]]
        assert sorted(firsts) == [window * seq_len for window in range(num_windows)]
    assert all(row == list(range(row[0], row[0] + seq_len + 1)) for row in rows)


def test_epochs_have_different_orders_and_so_have_seeds() -> None:
    orders = [tuple(shuffled(50, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert tuple(range(50)) not in orders


def test_the_order_is_the_same_for_ever() -> None:
    assert shuffled(8, 0, 0).tolist() == [1, 5, 4, 6, 0, 3, 7, 2]


@given(accumulation=st.integers(1, 5), local=st.integers(1, 5), dp_size=st.integers(1, 6))
def test_rows_dealt_to_ranks_and_microbatches_are_the_global_batch_once(
    accumulation: int, local: int, dp_size: int
) -> None:
    total = accumulation * local * dp_size
    dealt = [deal_rows(total, local, rank, dp_size) for rank in range(dp_size)]
    assert all(len(ranges) == accumulation and all(len(rows) == local for rows in ranges) for ranges in dealt)
    assert Counter(row for ranges in dealt for rows in ranges for row in rows) == Counter(range(total))


@settings(max_examples=30)
@given(step=st.integers(0, 50), split=st.sampled_from([(1, 12), (2, 6), (2, 1), (3, 2), (4, 3), (6, 1), (12, 1)]))
def test_the_global_batch_is_the_same_on_any_mesh(step: int, split: tuple[int, int]) -> None:
    dp_size, local = split
    dataset = counting_dataset(500, 7)
    whole = dataset.batch(step, range(12), 12)
    parts = {}
    for rank in range(dp_size):
        batches = dataset.microbatches(step, 12, local, rank, dp_size)
        for rows, batch in zip(deal_rows(12, local, rank, dp_size), batches, strict=True):
            parts.update(zip(rows, zip(batch["tokens"], batch["labels"], strict=True), strict=True))
    for row in range(12):
        assert torch.equal(parts[row][0], whole["tokens"][row])
        assert torch.equal(parts[row][1], whole["labels"][row])


@given(start=st.integers(0, 100), batch=st.integers(1, 9))
def test_a_new_dataset_resumes_at_any_step(start: int, batch: int) -> None:
    used, fresh = counting_dataset(300, 5), counting_dataset(300, 5)
    for step in range(max(0, start - 3), start):
        used.batch(step, range(batch), batch)
    assert torch.equal(
        used.batch(start, range(batch), batch)["tokens"], fresh.batch(start, range(batch), batch)["tokens"]
    )


def test_labels_are_the_next_tokens() -> None:
    batch = counting_dataset(100, 8).batch(3, [2, 0], 4)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["tokens"].shape == batch["labels"].shape == (2, 8)
    assert batch["tokens"].is_contiguous()
    assert batch["labels"].is_contiguous()
    assert torch.equal(batch["labels"], batch["tokens"] + 1)


@given(num_tokens=st.integers(40, 400), seq_len=st.integers(1, 8), fraction=st.floats(0.2, 0.7))
def test_validation_tokens_are_never_trained_on(num_tokens: int, seq_len: int, fraction: float) -> None:
    assume(seq_len < int(num_tokens * fraction) < num_tokens - seq_len)  # a row fits into each part
    seen = {}
    for split in ("train", "validation"):
        dataset = counting_dataset(num_tokens, seq_len, validation_fraction=fraction, split=split)
        seen[split] = {t for n in range(dataset.num_windows) for t in dataset.row(n, 0, 1).tolist()}
    assert max(seen["train"]) < min(seen["validation"])
    assert len(seen["validation"]) > num_tokens * fraction - seq_len - 1


def test_splits_share_one_array() -> None:
    dataset = counting_dataset(1000, 4, validation_fraction=0.1)
    validation = dataset.with_split("validation")
    assert validation.corpus is dataset.corpus
    assert validation.row(0, 0, 1)[0] >= 900


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_of_the_same_dataset_is_accepted() -> None:
    counting_dataset(100, 4).load_state_dict(counting_dataset(100, 4).state_dict())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (counting_dataset(100, 5), "seq_len was 5 and is 4"),
        (counting_dataset(100, 4, seed=1), "seed was 1 and is 0"),
        (
            counting_dataset(100, 4, validation_fraction=0.5),
            "num_tokens was 50 and is 100; validation_fraction was 0.5",
        ),
        (counting_dataset(101, 4), "data was '.*' and is '.*'; num_tokens was 101 and is 100"),
    ],
    ids=["seq_len", "seed", "split", "data"],
)
def test_state_of_another_dataset_is_refused_naming_the_difference(other: TextDataset, message: str) -> None:
    with pytest.raises(ValueError, match=rf"another dataset: {message}.*Restore these settings and files"):
        counting_dataset(100, 4).load_state_dict(other.state_dict())


def test_state_tells_tokenizers_and_texts_of_equal_length_apart(tmp_path: Path, hf_file: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three one two")
    a = text_dataset([tmp_path / "a.txt"])
    (tmp_path / "a.txt").write_text("one two three one owt")
    with pytest.raises(ValueError, match=r"dataset: data was '\w+' and is '\w+'\. Restore"):
        text_dataset([tmp_path / "a.txt"]).load_state_dict(a.state_dict())
    with pytest.raises(ValueError, match=r"tokenizer was 'bytes' and is 'sha256:"):
        text_dataset([tmp_path / "a.txt"], 3, tokenizer=str(hf_file)).load_state_dict(a.state_dict())


# ---- documents -------------------------------------------------------------------------------------------------------


def test_documents_are_known_from_files_not_from_token_values(tmp_path: Path) -> None:
    for name, text in (("a", "abc"), ("b", "d"), ("c", "efgh")):
        (tmp_path / f"{name}.txt").write_text(text)
    dataset = text_dataset([tmp_path / "*.txt"], seq_len=10)
    assert dataset.end_of_document == 256
    batch = dataset.batch(0, [0], 1)
    assert batch["tokens"].tolist() == [[97, 98, 99, 256, 100, 256, 101, 102, 103, 104]]
    assert batch["labels"].tolist() == [[98, 99, 256, 100, 256, 101, 102, 103, 104, 256]]
    assert batch.keys() == {"tokens", "labels"}
    assert dataset.document_ids(0, 0, 1).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert dataset.document_ids(0, 0, 1).dtype == torch.int64


def test_documents_of_a_row_count_from_zero(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("defgh")
    dataset = text_dataset([tmp_path / "*.txt"], seq_len=3)
    documents = {dataset.row(n, 0, 1)[0].item(): dataset.document_ids(n, 0, 1).tolist() for n in range(3)}
    assert documents == {ord("a"): [0, 0, 0], 256: [0, 1, 1], ord("f"): [0, 0, 0]}


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_stdlib_is_the_running_pythons_source_in_a_fixed_order() -> None:
    names = [file.name for file in stdlib_files()]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any(part in ("site-packages", "__pycache__", "test") for name in names for part in name.split("/"))
    dataset = make_dataset(DataConfig(), seq_len=2048)
    assert dataset.num_tokens > 5_000_000
    assert dataset.corpus.tokens.dtype == np.uint16
    assert dataset.corpus.tokens.max() == 256
    assert (dataset.corpus.tokens == 256).sum() == len(dataset.corpus.document_starts)


def test_stdlib_rows_are_the_same_in_another_process() -> None:
    code = (
        "from dtcp.train.data import DataConfig, make_dataset\n"
        "d = make_dataset(DataConfig(), seq_len=64, seed=3)\n"
        "print(d.state_dict()['data'], d.row(5, 1, 4).tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    dataset = make_dataset(DataConfig(), seq_len=64, seed=3)
    assert out.strip() == f"{dataset.state_dict()['data']} {dataset.row(5, 1, 4).tolist()}"


def test_stdlib_leaves_out_foreign_folders_and_what_it_cannot_read(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "__pycache__/c.py", "note.txt", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else name)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    files = stdlib_files(tmp_path)
    assert [file.name for file in files] == ["a/z.py", "b.py", "dangling.py", "empty.py"]
    corpus = read_corpus(files, ByteTokenizer(), description="it", max_bytes=None)
    assert bytes(corpus.tokens[corpus.tokens < 256].astype(np.uint8)) == b"a/z.pyb.py"
    with pytest.raises(ValueError, match=r"found no \.py files in .*; use source=text"):
        stdlib_files(tmp_path / "a" / "test" / "nothing")


def test_text_files_are_sorted_and_each_comes_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    given_paths = [str(tmp_path / p) for p in ("b.txt", "**/*.txt", "a.txt", "[1].txt")]
    names = [file.path.relative_to(tmp_path).as_posix() for file in text_files(given_paths)]
    assert names == ["[1].txt", "a.txt", "b.txt", "deep/er/c.txt"]


def test_max_bytes_stops_after_the_document_that_reaches_it(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 10)
    dataset = text_dataset([tmp_path / "[a-c]"], max_bytes=11)
    assert dataset.num_tokens == 22


def test_empty_files_of_a_glob_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("hello")
    assert text_dataset([tmp_path / "*.txt"]).num_tokens == 6


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hf_file(tmp_path: Path) -> Path:
    """A word-level tokenizer that would truncate and pad if it were let."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "one": 1, "two": 2, "three": 3, "<|endoftext|>": 9, "<": 4, "|": 5, "endoftext": 6, ">": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.WhitespaceSplit()])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_byte_tokenizer_round_trips_any_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
    assert tokenizer.decode([104, 195, 169, 256, 255]) == "hé��"


def test_hugging_face_file_is_read_without_truncation_padding_or_special_tokens(hf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three one <|endoftext|> two")
    dataset = text_dataset([tmp_path / "a.txt"], seq_len=10, tokenizer=str(hf_file))
    assert dataset.vocab_size == 10
    assert dataset.end_of_document == 9
    assert dataset.row(0, 0, 1).tolist() == [1, 2, 3, 1, 4, 5, 6, 5, 7, 2, 9]
    assert dataset.tokenizer.decode([1, 9]) == "one <|endoftext|>"


def test_tokenizer_errors_name_the_file_and_the_cure(hf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer must be 'bytes' or the path .* got 'byte', which is not a file"):
        make_tokenizer("byte")
    with pytest.raises(ValueError, match=r"or of its folder, got '.*tokenizer.json', which is not a file"):
        make_tokenizer(str(tmp_path / ".."))
    assert make_tokenizer(str(hf_file.parent)).fingerprint == make_tokenizer(str(hf_file)).fingerprint
    with pytest.raises(ValueError, match=r"tokenizer\.json has no '<eod>' .* set end_of_document .*<unk>"):
        make_tokenizer(str(hf_file), "<eod>")
    with pytest.raises(ValueError, match=r"tokenizer=bytes ends documents with id 256"):
        make_tokenizer("bytes", "<eod>")
    assert FileTokenizer(hf_file, "three").end_of_document == 3
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a Hugging Face tokenizer\.json"):
        make_tokenizer(str(tmp_path / "bad.json"))


def test_invalid_utf8_is_an_error_for_characters_and_none_for_bytes(hf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one two \xff three")
    assert text_dataset([tmp_path / "a.txt"]).num_tokens == 16
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: byte 0xff at offset 8; convert .* tokenizer=bytes"):
        text_dataset([tmp_path / "a.txt"], tokenizer=str(hf_file))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8"):
        text_dataset([tmp_path / "*.txt"], tokenizer=str(hf_file))


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_bad_files_are_named_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hey")
    with pytest.raises(ValueError, match=r"there is no file .*gone\.txt .*correct data\.paths"):
        text_dataset([tmp_path / "gone.txt"])
    with pytest.raises(ValueError, match=r"\*\.md matches no file in .*; correct data\.paths"):
        text_dataset([tmp_path / "*.md"])
    with pytest.raises(ValueError, match=r"is a folder; name its files, e\.g\. .*\*\*/\*\.txt"):
        text_dataset([tmp_path])
    with pytest.raises(ValueError, match=r"empty\.txt is empty; put text in it, or take it out of data\.paths"):
        text_dataset([tmp_path / "short.txt", tmp_path / "empty.txt"])
    with pytest.raises(ValueError, match=r"paths=.*e\*\.txt.* has no text: every file is empty"):
        text_dataset([tmp_path / "e*.txt"])
    with pytest.raises(
        ValueError, match=r"short\.txt.* has 4 tokens, 4 of them for train; .* needs 5\. Use seq_len <= 3, more"
    ):
        text_dataset([tmp_path / "short.txt"], seq_len=4)
    with pytest.raises(ValueError, match=r"needs a list of files or globs, got paths=\[\]"):
        text_dataset([])
    with pytest.raises(ValueError, match=r"cannot be read: .*; correct it or data\.paths"):
        read_corpus(
            [file for file in text_files([str(tmp_path / "short.txt")]) if not (tmp_path / "short.txt").unlink()],
            ByteTokenizer(),
            description="it",
            max_bytes=None,
        )


def test_a_validation_split_that_is_too_short_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"has 1000 tokens, 10 of them for validation; .*seq_len <= 9, another validation_fraction"
    ):
        counting_dataset(1000, 64, validation_fraction=0.01).with_split("validation")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"split": "test"}, "split must be train or validation, got 'test'"),
        ({"validation_fraction": 1.0}, r"validation_fraction must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_dataset_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counting_dataset(100, **{"seq_len": 4, **options})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "c4"}, "data.source must be one of stdlib, text, hf, got 'c4'"),
        ({"paths": ["a.txt"]}, "data.source=stdlib takes no paths"),
        ({"max_bytes": 0}, "data.max_bytes must be at least 1, got 0"),
    ],
)
def test_bad_data_configs_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_a_batch_that_cannot_be_dealt_names_the_nearest_sizes() -> None:
    with pytest.raises(ValueError, match=r"local_batch_size \* dp = 2 \* 3 = 6, got 10; nearest that work: 6 or 12"):
        deal_rows(10, 2, 0, 3)
    with pytest.raises(ValueError, match=r"nearest that work: 6$"):
        deal_rows(4, 2, 0, 3)
    with pytest.raises(ValueError, match=r"0 <= dp_rank < dp_size"):
        deal_rows(6, 2, 3, 3)


def test_rows_outside_the_global_batch_are_refused() -> None:
    dataset = counting_dataset(100, 4)
    with pytest.raises(ValueError, match=r"got step=0, index=4, global_batch_size=4"):
        dataset.row(0, 4, 4)
    with pytest.raises(ValueError, match=r"step=-1"):
        dataset.row(-1, 0, 4)
    with pytest.raises(ValueError, match="at least one row"):
        dataset.batch(0, [], 4)


# ---- packed documents ------------------------------------------------------------------------------------------------


def packed_dataset(lengths: list[int], seq_len: int, **options: object) -> TextDataset:
    """Token i is i; documents have ``lengths`` tokens, the end-of-document ones among them."""
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    corpus = Corpus("counting", np.arange(sum(lengths), dtype=np.int32), starts)
    options = {"validation_fraction": 0.0, "pack_documents": True, **options}
    return TextDataset(corpus, ByteTokenizer(), seq_len=seq_len, **options)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=30),
    seq_len=st.integers(1, 9),
    batch=st.integers(1, 3),
    step=st.integers(0, 20),
    reset=st.booleans(),
)
def test_packed_rows_say_where_documents_lie(
    lengths: list[int], seq_len: int, batch: int, step: int, reset: bool
) -> None:
    assume(sum(lengths) > seq_len)
    dataset = packed_dataset(lengths, seq_len, reset_positions=reset)
    read = dataset.batch(step, range(batch), batch)
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    for row in range(batch):
        tokens, labels, positions = (read[name][row].tolist() for name in ("tokens", "labels", "positions"))
        plain = dataset.row(step, row, batch).tolist()
        assert tokens == plain[:-1]  # packing changes no token
        ids = torch.atleast_2d(read["documents"].ids)[row].tolist()
        for i, token in enumerate(tokens):
            same = i > 0 and of_token[tokens[i - 1]] == of_token[token]
            assert ids[i] == (0 if i == 0 else ids[i - 1] + (not same))
            assert positions[i] == (i if not reset else positions[i - 1] + 1 if same else 0)
            assert labels[i] == (plain[i + 1] if of_token[token] == of_token[plain[i + 1]] else -100)


def test_a_document_that_is_cut_keeps_all_of_its_labels() -> None:
    dataset = packed_dataset([4, 20], 8)
    batches = [dataset.batch(0, [row], 2) for row in range(2)]
    by_first = {int(batch["tokens"][0, 0]): batch for batch in batches}
    assert by_first[0]["labels"].tolist() == [[1, 2, 3, -100, 5, 6, 7, 8]]
    assert by_first[8]["labels"].tolist() == [[9, 10, 11, 12, 13, 14, 15, 16]]
    assert by_first[0]["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert by_first[8]["positions"].tolist() == [list(range(8))]  # what was cut off begins anew


def test_packed_rows_are_the_same_on_any_mesh_and_after_a_resume() -> None:
    dataset, fresh = (packed_dataset([5, 1, 17, 2, 30, 9] * 8, 7) for _ in range(2))
    dataset.batch(3, range(4), 4)
    whole = fresh.batch(9, range(4), 4)
    for row in range(4):
        part = dataset.batch(9, [row], 4)
        assert part["documents"] == whole["documents"].select_rows([row])
        assert all(torch.equal(part[name][0], whole[name][row]) for name in ("tokens", "labels", "positions"))


def test_validation_is_packed_like_training() -> None:
    validation = packed_dataset([5] * 40, 8, validation_fraction=0.2).with_split("validation")
    assert validation.batch(0, [0], 1)["documents"].max_len <= 5


def test_a_checkpoint_of_unpacked_rows_is_not_gone_on_from_with_packed_ones() -> None:
    packed, plain = packed_dataset([50, 50], 4), packed_dataset([50, 50], 4, pack_documents=False)
    with pytest.raises(ValueError, match="pack_documents was None and is True; reset_positions was None and is True"):
        packed.load_state_dict(plain.state_dict())
    packed.load_state_dict(packed.state_dict())
    assert "pack_documents" not in plain.state_dict()


def test_restarting_positions_without_packing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got data.pack_documents=false.*set data.pack_documents=true"):
        DataConfig(reset_positions=True)
    with pytest.raises(ValueError, match="set data.pack_documents=true"):
        packed_dataset([50, 50], 4, pack_documents=False, reset_positions=True)
