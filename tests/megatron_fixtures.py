"""Fixtures of the tests that run `pretrain()`: a pytest plugin, shared by their modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_world import WORDS, ChatFile, Megatron, chat_file


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE that makes one token of each word of the tests' vocabulary."""
    from odb_megatron.data.tokenizer import train_bpe

    texts = ["user assistant\n", " ".join(WORDS), *WORDS] * 20
    folder = tmp_path_factory.mktemp("pretrain") / "tokenizer"
    return train_bpe(texts, vocab_size=400, folder=folder)


@pytest.fixture(scope="session")
def megatron(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path
) -> Iterator[Megatron]:
    """The replicas."""
    running = Megatron(tmp_path_factory.mktemp("runs"), str(tokenizer_folder))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def chats(tokenizer_folder: Path) -> ChatFile:
    """61 training conversations of 14 to 64 tokens, most of them short."""
    return chat_file(tokenizer_folder, name="train", num_records=61, seed=1)


@pytest.fixture(scope="session")
def valid_chats(tokenizer_folder: Path) -> ChatFile:
    """19 conversations for evaluation."""
    return chat_file(tokenizer_folder, name="valid", num_records=19, seed=2)


@pytest.fixture(scope="session")
def data_flags(chats: ChatFile, valid_chats: ChatFile) -> tuple[str, ...]:
    """Both files; evaluations are of one batch."""
    return (
        *("--train-data-path", chats.path, "--valid-data-path", valid_chats.path),
        *("--eval-iters", "1"),
    )
