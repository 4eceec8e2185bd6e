"""What data may look like, and what is said of data that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compilespec.errors import CheckpointError, InvalidOption
from compilespec.training.batches import epoch_batches, make_batch
from compilespec.training.data import FileData, Sample, read_prompts, split_held_out
from compilespec.training.files import Journal, read_records, replace
from tests.support.toy_tokenizer import byte_level_tokenizer
from tests.support.training import write_lines

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = byte_level_tokenizer([bytes([i]) for i in range(128)] + ["<end>"], eos="<end>")
    made.chat_template = TEMPLATE
    return made


def read(path: Path, tokenizer: Any, **sizes: int) -> list[Sample]:
    given = {"vocab_size": 200, "max_length": 40, **sizes}
    return list(FileData(path, tokenizer, **given).samples())


def text_of(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    ids = list(sample.token_ids)
    return tokenizer.decode(ids[: sample.start]), tokenizer.decode(ids[sample.start :])


def test_each_answer_of_a_conversation_is_a_sample(tokenizer, tmp_path):
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "so long"},
    ]
    data = write_lines(tmp_path / "d.jsonl", [{"messages": talk, "domain": "chat"}])
    samples = read(data, tokenizer, max_length=100)
    assert [text_of(tokenizer, one) for one in samples] == [
        ("<u>hi<a>", "hello<end>"),
        ("<u>hi<a>hello<end><u>bye<a>", "so long<end>"),
    ]
    assert {one.domain for one in samples} == {"chat"}


def test_documents_are_cut_and_files_of_a_folder_are_read_in_order(tokenizer, tmp_path):
    (tmp_path / "b.txt").write_text("x" * 100)
    write_lines(tmp_path / "a.jsonl", [{"text": "abcdef"}, {"token_ids": [1, 2, 3, 4]}])
    samples = read(tmp_path, tokenizer)
    assert [len(one) for one in samples] == [6, 4, 40, 40, 20]
    assert all(one.start == 1 for one in samples)


def test_a_file_that_grows_gives_what_is_new_at_the_end(tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"token_ids": [1, 2, 3, n]} for n in range(4)])
    data = FileData(path, tokenizer, vocab_size=200, max_length=40)
    first = list(data.samples())
    with path.open("a") as file:
        file.write(json.dumps({"token_ids": [9, 9, 9, 9]}) + '\n{"token_ids": [1, 2')
    again = list(data.samples())
    assert again[:4] == first
    assert [one.token_ids for one in again[4:]] == [(9, 9, 9, 9)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "a prompt without an answer"),
        ({"prompt": "hi"}, "a prompt without an answer"),
        ({"prompt_token_ids": [1], "token_ids": [3, 4, 200]}, "token id 200 is not one of this"),
        ({"prompt_token_ids": [-1], "token_ids": [3, 4, 5]}, "token id -1 is not one of this"),
        ({"body": "hi"}, "got the keys body"),
        ({"token_ids": [3]}, "nothing to learn from"),
    ],
    ids=["messages", "prompt", "other model", "negative", "keys", "short"],
)
def test_lines_that_cannot_be_learned(tokenizer, tmp_path, line, why):
    path = write_lines(tmp_path / "d.jsonl", [line])
    with pytest.raises(InvalidOption, match=why):
        read(path, tokenizer)


def test_missing_templates_tokenizers_and_files(tokenizer, tmp_path):
    bare = byte_level_tokenizer([bytes([i]) for i in range(128)] + ["<end>"], eos="<end>")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": talk}])
    with pytest.raises(InvalidOption, match=r"d.jsonl:1: .*no chat template"):
        read(path, bare)
    with pytest.raises(InvalidOption, match="no tokenizer"):
        read(write_lines(tmp_path / "t.jsonl", [{"text": "abc"}]), None)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InvalidOption, match="nothing to learn from"):
        read(tmp_path / "empty.jsonl", tokenizer)
    with pytest.raises(CheckpointError, match=r"expected a file with the suffix .jsonl or .txt"):
        read(write_lines(tmp_path / "a.json", []), tokenizer)
    with pytest.raises(
        CheckpointError, match=r"emty\.jsonl does not exist; did you mean empty\.json"
    ):
        read(tmp_path / "emty.jsonl", tokenizer)
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(CheckpointError, match="one JSON object a line"):
        read(tmp_path / "bad.jsonl", tokenizer)


def test_prompts_are_read_once_each(tmp_path):
    asked = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"prompt": "a"}]
    path = write_lines(tmp_path / "p.jsonl", asked)
    prompts, told = read_prompts(path)
    assert (len(prompts), told) == (2, ["prompts: 2, 1 that came twice left out"])
    with pytest.raises(InvalidOption, match="expected a prompt to answer"):
        read_prompts(write_lines(tmp_path / "q.jsonl", [{"text": "a"}]))


def test_a_sample_stays_on_its_side_and_batches_are_bounded():
    samples = [Sample(token_ids=(n, *range(2, 4 + n % 9)), start=1) for n in range(100)]
    learned, judged = split_held_out(samples, 5)
    assert 5 < len(judged) < 40
    again = split_held_out(samples[:50], 5)
    assert again[0] == learned[: len(again[0])]
    batches = list(epoch_batches(learned, seed=0, epoch=1, batch_tokens=40))
    assert sorted(one.token_ids for b in batches for one in b) == sorted(
        one.token_ids for one in learned
    )
    assert all(len(b) * max(map(len, b)) <= 40 for b in batches)
    assert batches == list(epoch_batches(learned, seed=0, epoch=1, batch_tokens=40))
    assert batches != list(epoch_batches(learned, seed=0, epoch=2, batch_tokens=40))


def test_a_batch_learns_from_what_was_written_or_from_all():
    samples = [Sample(token_ids=(5, 6, 7, 8, 9), start=3), Sample(token_ids=(1, 2, 3), start=1)]
    everything = make_batch(samples, learn_prompts=True)
    assert everything.origins.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert everything.weights(0).tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    batch = make_batch(samples)
    assert batch.origins.tolist() == [[2], [0]]
    assert batch.weights(0).tolist() == [[1.0], [1.0]]
    assert batch.weights(1).tolist() == [[0.0], [0.0]]
    assert batch.ids_at(batch.origins + 9).tolist() == [[0], [0]]


def test_a_journal_cuts_off_half_a_record_and_a_full_disk_leaves_none(tmp_path, monkeypatch):
    path = tmp_path / "j.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    with Journal(path) as journal:
        journal.append({"a": 3})

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(CheckpointError, match="No space left"):
                journal.append({"a": 4})
        journal.append({"a": 5})
    assert [record["a"] for _, record in read_records(path)] == [1, 3, 5]

    def broken(part: Path) -> None:
        part.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"j.jsonl cannot be written"):
        replace(path, broken)
    assert [one.name for one in tmp_path.iterdir()] == ["j.jsonl"]


def test_bare_texts_become_messages_where_that_is_asked(tmp_path):
    asked = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"prompt": [1]}]
    path = write_lines(tmp_path / "p.jsonl", asked)
    prompts, told = read_prompts(path, as_messages=True)
    message = {"messages": [{"role": "user", "content": "a"}]}
    assert [one.prompt for one in prompts] == [message, {"messages": asked[1]["messages"]}, [1]]
    assert told == ["prompts: 3, 1 bare texts asked through the model's chat template"]
    assert read_prompts(path)[0][0].prompt == "a"


def test_what_teaches_nothing_is_counted(tmp_path):
    given = [1, 2, 3]
    lines = [{"prompt_token_ids": given, "token_ids": ids} for ids in ([4, 5], [4], [], [4, 5, 6])]
    lines.append({"prompt_token_ids": [*range(1, 9)], "token_ids": [4, 5]})
    path = write_lines(tmp_path / "a.jsonl", lines)
    data = FileData(path, None, vocab_size=10, max_length=8)
    assert [len(one) for one in data.samples()] == [5, 6]
    assert data.told() == [
        "left out: 2 answers of fewer than two tokens",
        "left out: 1 prompts that leave no room below the length of a sequence",
    ]
    write_lines(tmp_path / "b.jsonl", lines[1:3])
    with pytest.raises(InvalidOption, match="left out: 2 answers of fewer than two tokens"):
        FileData(tmp_path / "b.jsonl", None, vocab_size=10, max_length=8).samples()
