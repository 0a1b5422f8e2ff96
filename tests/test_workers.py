"""`odb_megatron.data.workers`: what is sent to worker processes, and what they import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_data import Letters, Records, rules, single_stream

from odb_megatron.data.chat_template import ChatRenderer
from odb_megatron.data.order import PassOrder
from odb_megatron.data.replica_stream import ReplicaStream
from odb_megatron.data.sample import Sample
from odb_megatron.data.sources import ChatSource
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.data.workers import Packed, Workers, WorkerStart

AFRESH = (WorkerStart.FORKSERVER, WorkerStart.SPAWN)


def test_what_a_packed_object_needs() -> None:
    packed = Packed(single_stream(Records([3] * 4)))
    assert not packed.needs_main
    assert {"made_up_data", "odb_megatron.data.stream"} <= set(packed.modules())
    assert "__main__" not in packed.modules()
    assert Packed("__main__").needs_main
    stream = packed.unpack()
    assert isinstance(stream, SampleStream)
    assert len(stream) == 4


def test_modules_of_a_very_large_object_are_not_looked_for() -> None:
    assert Packed([np.zeros(1 << 22), Records([3])]).modules() == []


@pytest.mark.parametrize("start", AFRESH)
def test_data_that_cannot_be_sent_is_refused(start: WorkerStart) -> None:
    class Local(Records):
        """Cannot be imported by a worker."""

    stream = single_stream(Local([3] * 4))
    with pytest.raises(ValueError, match="the data cannot be sent to worker processes") as caught:
        ReplicaStream(stream, range(4), workers=Workers(num=1, start=start))
    assert "at the top level of a module" in str(caught.value)
    assert "--odb-worker-start fork, or --num-workers 0" in str(caught.value)
    forked = ReplicaStream(stream, range(4), workers=Workers(num=1, start=WorkerStart.FORK))
    assert isinstance(forked.take(0), Sample)


def test_chats_with_a_template_and_a_tokenizer_reach_workers(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    path.write_text((json.dumps({"messages": messages}) + "\n") * 6, encoding="utf-8")
    renderer = ChatRenderer(Letters())
    source = ChatSource(str(path), rules=rules(context=256, token_budget=256), renderer=renderer)
    order = PassOrder(np.arange(6), seed=1)
    stream = SampleStream([SourcePart(source=source, order=order)])
    expected: Any = stream.fetch(0)
    for start in WorkerStart:
        found = ReplicaStream(stream, range(6), workers=Workers(num=1, start=start)).take(0)
        assert isinstance(found, Sample)
        assert found.tokens.tolist() == expected.tokens.tolist()


_SCRIPT = """
import os, sys
import numpy as np
from made_up_data import Records, single_stream
from odb_megatron.data.replica_stream import ReplicaStream
from odb_megatron.data.workers import Workers, WorkerStart

print("imported by", __name__, flush=True)

class Own(Records):
    pass

if __name__ == "__main__":
    kind, start = sys.argv[1:]
    stream = single_stream((Own if kind == "own" else Records)([3] * 8))
    source = ReplicaStream(stream, range(8), workers=Workers(num=2, start=WorkerStart(start)))
    print("lengths", [len(source.take(position)) for position in range(8)])
    assert sys.modules["__main__"].__file__ == __file__
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", AFRESH)
@pytest.mark.parametrize("kind", ["own", "imported"])
def test_workers_import_the_main_script_only_for_its_classes(
    tmp_path: Path, start: WorkerStart, kind: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, str(script), kind, start.value],
        env={"PYTHONPATH": ":".join(paths), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lengths [3, 3, 3, 3, 3, 3, 3, 3]" in done.stdout
    assert ("imported by __mp_main__" in done.stdout) == (kind == "own")
