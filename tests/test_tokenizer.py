"""`odb_megatron.data.tokenizer`: transformers' and Megatron's tokenizers in one form, training."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.chat_record import PlainText, parse_record
from odb_megatron.data.tokenizer import CHATML_TEMPLATE, TextTokenizer, load_tokenizer, train_bpe

TEXTS = [f"line {i}: the quick brown fox, élan 😀\n\n  indented {i * 7}\n" for i in range(40)]
CHAT = parse_record({"question": "fox?", "answer": "brown 1"})
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
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


def test_the_trained_folder(trained: Path, tmp_path: Path) -> None:
    loaded = load_tokenizer(trained)
    assert len(loaded) <= 512
    named = (loaded.eos_token, loaded.pad_token, loaded.bos_token)
    assert named == ("<|endoftext|>", "<|pad|>", None)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    assert loaded.convert_tokens_to_ids(names) == [0, 1, 2, 3]
    assert loaded.chat_template == CHATML_TEMPLATE
    for text in (TEXTS[3], "\0\x7f ünknown 漢字 \t\r\n", " <|im_end|> x"):
        assert loaded.decode(loaded.encode(text)) == text
    again = train_bpe(TEXTS, vocab_size=512, folder=tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("given_by", ["folder", "flag", "metadata"])
def test_megatrons_hugging_face_tokenizer(trained: Path, tmp_path: Path, given_by: str) -> None:
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({"library": "huggingface", "chat_template": TEMPLATE}))
    given: dict[str, object] = {
        "folder": {},
        "flag": {"chat_template": TEMPLATE},
        "metadata": {"metadata_path": str(metadata)},
    }[given_by]  # type: ignore[assignment]
    megatron = _megatron("HuggingFaceTokenizer", tokenizer_model=str(trained), **given)
    ours, alone = ChatRenderer(megatron), ChatRenderer(load_tokenizer(trained))
    for record in (CHAT, PlainText(text="fox")):
        (ids, weights), expected = ours.render(record), alone.render(record)
        if given_by == "folder" or record is not CHAT:
            assert ids.tolist() == expected[0].tolist()
            assert weights.tolist() == expected[1].tolist()
        else:  # a template that was given to Megatron counts
            assert megatron.detokenize(ids.tolist()) == "fox?brown 1"
            assert "".join(ours.tokenizer.decode(ids[weights > 0].tolist())) == "brown 1"
    assert megatron.detokenize(ids.tolist()) == "fox<|endoftext|>"
    assert len(ours.tokenizer) == len(load_tokenizer(trained))


def test_special_tokens_that_megatron_is_told_to_leave_out(trained: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    loaded = load_tokenizer(trained)
    loaded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    for included, first in ((True, [1]), (False, [])):
        library = argparse.Namespace(tokenizer=loaded, include_special_tokens=included)
        ids = TextTokenizer(argparse.Namespace(_tokenizer=library)).encode_document("fox")
        assert ids[:1] == (first or ids[:1])
        assert (1 in ids) is included


def test_megatrons_other_tokenizers(trained: Path) -> None:
    from megatron.core.tokenizers import MegatronTokenizer

    byte_level = MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
    ids, weights = ChatRenderer(byte_level).render(CHAT)
    text = "<|im_start|>user\nfox?<|im_end|>\n<|im_start|>assistant\nbrown 1<|im_end|>\n"
    assert bytes(ids.tolist()).decode() == text
    assert bytes(ids[weights > 0].tolist()).decode() == "brown 1<|im_end|>"
    assert TextTokenizer(byte_level).encode_document("a") == [*b"a", 0]
    for end in (-1, None):  # there is none
        library = argparse.Namespace(eos_id=end, text_to_ids=lambda text: [len(text)])
        assert TextTokenizer(library).encode_document("abc") == [3]
    for refused, error in (
        (_megatron("NullTokenizer", vocab_size=100), "NullTokenizer cannot tokenize text; pass -"),
        (_megatron("SFTTokenizer", tokenizer_model=str(trained)), "SFTTokenizer formats chats by"),
        ({}, "a dict cannot tokenize text"),
    ):
        with pytest.raises(ValueError, match=error):
            TextTokenizer(refused)


def test_a_tokenizer_with_a_chat_format_of_its_own(trained: Path) -> None:
    loaded = load_tokenizer(trained)
    loaded.__class__ = type("Own", (type(loaded),), {"apply_chat_template": lambda self: None})
    with pytest.raises(ValueError, match="Own formats chats by its own code"):
        TextTokenizer(loaded)


def test_truncation_set_later_and_pickling(trained: Path) -> None:
    loaded = load_tokenizer(trained)
    loaded.backend_tokenizer.enable_truncation(3)
    ours = TextTokenizer(loaded)
    loaded.backend_tokenizer.enable_truncation(2)
    for one in (ours, pickle.loads(pickle.dumps(ours))):
        ids, offsets = one.encode("the quick brown fox")
        assert offsets[-1][1] == 19
        assert "".join(one.decode(ids)) == "the quick brown fox"
