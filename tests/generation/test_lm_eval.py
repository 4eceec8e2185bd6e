"""lm-eval scores an attached model as it scores the model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from tests.support.models import VOCAB, tiny_target
from tests.support.toy_tokenizer import byte_level_tokenizer

TASKS = {
    "toy_choice": """
output_type: multiple_choice
doc_to_choice: ["so", "go"]
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "toy_text": """
output_type: generate_until
doc_to_target: "{{text}}"
generation_kwargs: {until: ["UNTIL"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def scored(model: Any, directory: Path) -> Any:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    letters = [bytes([code]) for code in range(32, 32 + VOCAB - 3)]
    tokenizer = byte_level_tokenizer(["<pad>", "<bos>", "<eos>", *letters], eos="<eos>")
    tokenizer.pad_token = "<pad>"
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=100),
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(directory), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = {
        task: [(one["filtered_resps"], one["resps"]) for one in found["samples"][task]]
        for task in TASKS
    }
    return samples, found["results"]


def write_tasks(directory: Path, until: str) -> None:
    texts = ["say so", "hello you", "go on now", "the end", "what is it", "a b a b a b"]
    lines = [json.dumps({"text": text, "label": len(text) % 2}) for text in texts]
    (directory / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, lines in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{{{text}}}}'\n"
        files = f"dataset_kwargs: {{data_files: {{test: {directory / 'texts.jsonl'}}}}}\n"
        text = head + files + lines.replace("UNTIL", until)
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scores_and_texts_are_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: make test-trainers")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model: Any = tiny_target("llama", torch.float32, num_layers=2)
    write_tasks(tmp_path, until="e")
    attached: Any = compilespec.attach(
        copy.deepcopy(model), "ngram", num_draft_tokens=3, max_seq_len=128, backend="eager"
    )
    samples, results = scored(model, tmp_path)
    assert scored(attached, tmp_path) == (samples, results)
    texts = [answers[0] for answers, _ in samples["toy_text"]]
    assert len(set(texts)) > 2
    assert any(len(text) < 16 for text in texts)
    assert compilespec.engine_of(attached).stats().num_emitted > 0
    compilespec.detach(attached)
