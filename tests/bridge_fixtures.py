"""Fixtures of the tests of Megatron-Bridge: a pytest plugin, shared by their modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bridge_run import Bridge
from megatron_world import ChatFile


@pytest.fixture(scope="session")
def bridge(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_folder: Path,
    chats: ChatFile,
    valid_chats: ChatFile,
) -> Iterator[Bridge]:
    """Two ranks that run one case after the other."""
    running = Bridge(
        tmp_path_factory.mktemp("bridge"),
        tokenizer=str(tokenizer_folder),
        data=(
            f"dataset.odb.train_data_path={chats.path}",
            f"dataset.odb.valid_data_path={valid_chats.path}",
        ),
    )
    yield running
    running.stop()
