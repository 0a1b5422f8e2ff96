"""Tests of `odb_megatron.data.tokenizer`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from odb_megatron.data.chat import CHATML_TEMPLATE, ChatRenderer, TextTokenizer
from odb_megatron.data.chat_record import PlainText, parse_record
from odb_megatron.data.tokenizer import (
    END_NAMES,
    PAD_NAMES,
    MegatronTextTokenizer,
    adds_special_tokens,
    hf_tokenizer,
    load_tokenizer,
    tokenizer_folder,
    train_bpe,
    usable_tokenizer,
)

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [f"line {i}: the quick brown fox, élan 😀\n\n  indented {i * 7}\n" for i in range(40)]
CHAT = parse_record({"question": "fox?", "answer": "brown 1"})


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(TEXTS, vocab_size=512, folder=tmp_path_factory.mktemp("bpe") / "tokenizer")


def _megatron(kind: str, **given: object) -> Any:
    """Megatron's own tokenizer object, as its pretrain scripts build it."""
    build = pytest.importorskip(
        "megatron.core.tokenizers.utils.build_tokenizer", reason="megatron-core is not installed"
    )
    args: dict[str, object] = {
        "tokenizer_type": kind, "tokenizer_model": None, "chat_template": None,
        "vocab_file": None, "merge_file": None, "special_tokens": None,
        "tokenizer_hf_no_use_fast": False, "tokenizer_hf_no_include_special_tokens": False,
        "trust_remote_code": False, "metadata_path": None, "vocab_size": None,
        "pad_vocab_size": True, "padded_vocab_size": None, "rank": 0,
        "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1,
        "sft_tokenizer_prompt_format": "default",
    }  # fmt: skip
    return build.build_tokenizer(argparse.Namespace(**{**args, **given}))


def test_the_trained_folder(trained: Path) -> None:
    assert sorted(p.name for p in trained.iterdir()) == [
        "fingerprint.txt", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    loaded = load_tokenizer(trained)
    assert len(loaded) <= 512
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == (
        "<|endoftext|>",
        "<|pad|>",
        None,
    )
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    assert loaded.convert_tokens_to_ids(names) == [0, 1, 2, 3]
    assert loaded.chat_template == CHATML_TEMPLATE
    for text in (TEXTS[3], "\0\x7f ünknown 漢字 \t\r\n", " <|im_end|> x"):
        assert loaded.decode(loaded.encode(text)) == text
    assert list(trained.parent.iterdir()) == [trained]  # no draft is left


def test_training_is_deterministic(trained: Path, tmp_path: Path) -> None:
    here = train_bpe(iter(TEXTS), vocab_size=512, folder=tmp_path / "here")
    code = (
        "import sys; from odb_megatron.data.tokenizer import train_bpe; import json;"
        "train_bpe(json.loads(sys.argv[1]), vocab_size=512, folder=sys.argv[2])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, json.dumps(TEXTS), str(tmp_path / "there")]
    subprocess.run(command, check=True, env=env)
    for name in ("tokenizer.json", "tokenizer_config.json", "fingerprint.txt"):
        data = (trained / name).read_bytes()
        assert (here / name).read_bytes() == data
        assert (tmp_path / "there" / name).read_bytes() == data


def test_a_trained_folder_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    train_bpe(TEXTS, vocab_size=300, folder=folder)
    (folder / "tokenizer.json").write_text("kept")
    assert train_bpe(TEXTS, vocab_size=300, folder=folder) == folder
    assert (folder / "tokenizer.json").read_text() == "kept"
    for texts, size in ((TEXTS, 301), (TEXTS[1:], 300), (["".join(TEXTS)], 300)):
        with pytest.raises(ValueError, match="exists and was not made from these inputs"):
            train_bpe(texts, vocab_size=size, folder=folder)
    with pytest.raises(ValueError, match="vocab_size is 259; expected at least 260"):
        train_bpe(TEXTS, vocab_size=259, folder=folder)
    (tmp_path / "empty").mkdir()
    assert len(load_tokenizer(train_bpe([], vocab_size=260, folder=tmp_path / "empty"))) == 260


def test_two_processes_that_train_at_once(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        if not Path(target).exists():
            shutil.copytree(trained, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    folder = train_bpe(TEXTS, vocab_size=512, folder=tmp_path / "t")
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(ValueError, match="was not made from these inputs"):
        train_bpe(TEXTS[1:], vocab_size=512, folder=tmp_path / "u")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t", "u"]


def test_a_failed_training_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb_megatron.data.tokenizer._trained", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_bpe(TEXTS, vocab_size=512, folder=tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_taken_as_it_is(trained: Path, tmp_path: Path) -> None:
    assert tokenizer_folder(trained, tmp_path) == trained
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("renamed", "end", "pad"),
    [
        ({}, "<|endoftext|>", "<|pad|>"),
        ({"<|endoftext|>": "</s>", "<|pad|>": "<unk>"}, "</s>", "<unk>"),
        ({"<|endoftext|>": "a1", "<|im_end|>": "a2", "<|pad|>": "a3"}, None, None),
    ],
)
def test_a_bare_file_gets_a_folder(
    trained: Path, tmp_path: Path, renamed: dict[str, str], end: str | None, pad: str | None
) -> None:
    text = (trained / "tokenizer.json").read_text()
    for old, new in renamed.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    file = tmp_path / "my tokenizer.json"
    file.write_text(text)
    folder = tokenizer_folder(file, tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    assert tokenizer_folder(str(file), tmp_path / "cache") == folder
    loaded = load_tokenizer(folder)
    assert (loaded.eos_token, loaded.pad_token) == (end, pad)
    assert loaded.chat_template is None
    assert loaded.encode(TEXTS[0]) == load_tokenizer(trained).encode(TEXTS[0])
    assert end in (None, *END_NAMES)
    assert pad in (None, *PAD_NAMES)


def test_paths_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.model").touch()
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "sub").mkdir()
    for name, error in [
        ("sub", "sub holds no tokenizer; expected one of tokenizer.json, .*: name the folder"),
        ("none", r"none does not exist; .* \(names of a model hub are not looked up"),
        ("a.model", "is not a tokenizer.json; .* --tokenizer-type SentencePieceTokenizer"),
        ("a.json", r"is not a tokenizer.json \(.*name one written by tokenizers' save"),
    ]:
        with pytest.raises(ValueError, match=error):
            tokenizer_folder(tmp_path / name, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_megatrons_hugging_face_tokenizer(trained: Path) -> None:
    megatron = _megatron("HuggingFaceTokenizer", tokenizer_model=str(trained))
    ours = load_tokenizer(trained)
    inside = hf_tokenizer(megatron)
    assert usable_tokenizer(megatron) is inside
    assert hf_tokenizer(inside) is inside
    assert hf_tokenizer(megatron._tokenizer) is inside
    for text in TEXTS[:5]:
        assert megatron.tokenize(text) == inside.encode(text) == ours.encode(text)
    assert inside.eos_token_id == megatron.eod == 0
    assert adds_special_tokens(megatron)
    for record in (CHAT, PlainText(text="fox")):
        expected, weights = ChatRenderer(ours).render(record)
        got, got_weights = ChatRenderer(inside).render(record)
        assert got.tolist() == expected.tolist()
        assert got_weights.tolist() == weights.tolist()
    assert megatron.detokenize(got.tolist()) == "fox<|endoftext|>"


def test_templates_given_to_megatron_are_used(trained: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    flag = _megatron("HuggingFaceTokenizer", tokenizer_model=str(trained), chat_template=template)
    assert hf_tokenizer(flag).chat_template == template
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({"library": "huggingface", "chat_template": template}))
    file = _megatron(
        "HuggingFaceTokenizer",
        tokenizer_model=str(trained),
        metadata_path=str(metadata),
        tokenizer_hf_no_include_special_tokens=True,
    )
    assert hf_tokenizer(file).chat_template == template
    ids, weights = ChatRenderer(hf_tokenizer(file)).render(CHAT)
    assert hf_tokenizer(file).decode(ids) == "fox?brown 1"
    assert hf_tokenizer(file).decode(ids[weights > 0]) == "brown 1"
    assert not adds_special_tokens(file)


def test_megatrons_other_tokenizers(trained: Path) -> None:
    from megatron.core.tokenizers import MegatronTokenizer

    byte_level = MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
    ours = usable_tokenizer(byte_level)
    assert isinstance(ours, MegatronTextTokenizer)
    assert isinstance(ours, TextTokenizer)
    assert usable_tokenizer(ours) is ours
    assert (ours.eos_id, ours.chat_template) == (0, None)
    ids, weights = ChatRenderer(ours).render(CHAT)
    text = "<|im_start|>user\nfox?<|im_end|>\n<|im_start|>assistant\nbrown 1<|im_end|>\n"
    assert bytes(ids.tolist()).decode() == text
    assert bytes(ids[weights > 0].tolist()).decode() == "brown 1<|im_end|>"
    with pytest.raises(ValueError, match="no HF tokenizer inside ByteLevelTokenizer; pass --tok"):
        hf_tokenizer(byte_level)
    with pytest.raises(ValueError, match="NullTokenizer only reads numbers, .* HuggingFaceTok"):
        usable_tokenizer(_megatron("NullTokenizer", vocab_size=100))
    sft = _megatron("SFTTokenizer", tokenizer_model=str(trained))
    with pytest.raises(ValueError, match="SFTTokenizer formats chats by a prompt format of its o"):
        usable_tokenizer(sft)
    with pytest.raises(ValueError, match="dict has no text_to_ids, so it is no tokenizer of Meg"):
        usable_tokenizer({})


def test_an_end_id_that_does_not_exist_is_none() -> None:
    for value in (-1, None):
        library = argparse.Namespace(eos_id=value, text_to_ids=lambda text: [len(text)])
        assert MegatronTextTokenizer(library).eos_id is None
        assert MegatronTextTokenizer(library).encode("abc") == [3]
