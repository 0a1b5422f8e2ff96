"""`odb_megatron.data.workers`: what is sent to processes, and what they import."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from synthetic_data import (
    Letters,
    check_content,
    metadata_of,
    rules,
    step_config,
    steps_of,
)

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.order import PassOrder
from odb_megatron.data.sources import ChatSource
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.data.wire import decode_step
from odb_megatron.data.workers import FetchTimeoutError, limited, starting
from odb_megatron.testing.replicas import thread_channels


def test_chats_with_a_template_and_a_tokenizer_reach_workers(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    path.write_text((json.dumps({"messages": messages}) + "\n") * 6, encoding="utf-8")
    limits = {"context": 256, "token_budget": 256}
    source = ChatSource(str(path), rules=rules(**limits), renderer=ChatRenderer(Letters()))
    order = PassOrder(np.arange(6), seed=1)
    stream = SampleStream([SourcePart(source=source, order=order)])
    config = step_config(total=6, num_replicas=1, token_budget=256)
    (channel,) = thread_channels(1)
    steps = steps_of(StepLoader(stream, config, channel=channel, num_workers=1))
    assert len(steps) == 2
    for step in steps:
        check_content(decode_step(metadata_of(step), step.payload), stream)


_SCRIPT = """
import sys
from synthetic_data import Records, metadata_of, single_stream, step_config, steps_of
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.testing.replicas import thread_channels

print("imported by", __name__, flush=True)

class Own(Records):
    pass

if __name__ == "__main__":
    stream = single_stream((Own if sys.argv[1] == "own" else Records)([3] * 8))
    config = step_config(total=8, num_replicas=1)
    loader = StepLoader(stream, config, channel=thread_channels(1)[0], num_workers=2)
    print("lengths", [metadata_of(step).lengths for step in steps_of(loader)])
    assert sys.modules["__main__"].__file__ == __file__
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "imported"])
def test_processes_import_the_main_script_only_for_its_classes(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, str(script), kind],
        env={"PYTHONPATH": ":".join(paths), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lengths [((3, 3, 3, 3),), ((3, 3, 3, 3),)]" in done.stdout
    assert ("imported by __mp_main__" in done.stdout) == (kind == "own")


def test_full_shared_memory_is_named() -> None:
    full = r"/dev/shm has \d+ KiB free; make it larger"
    with pytest.raises(RuntimeError, match=full), starting():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), starting():
        raise PermissionError(errno.EACCES, "no")


def test_what_takes_too_long_is_interrupted_and_named() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(FetchTimeoutError, match="^record 4 took longer than 0.05 s") as caught,
        limited(0.05, what=lambda: "record 4"),
    ):
        time.sleep(600)
    assert "time.sleep(600)" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(KeyError), limited(0.2, what=lambda: "it"):
        raise KeyError
    time.sleep(0.3)  # no alarm comes later
    assert signal.getsignal(signal.SIGALRM) == before
