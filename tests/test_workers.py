"""`odb_megatron.data.workers`: what is sent to the loop's process, and what that imports."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_up_data import Records, single_stream

from odb_megatron.data.stream import SampleStream
from odb_megatron.data.workers import Packed, starting


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


def test_data_that_cannot_be_sent_is_refused() -> None:
    class Local(Records):
        """Cannot be imported by another process."""

    with pytest.raises(ValueError, match="the data cannot be sent to worker processes") as caught:
        Packed(single_stream(Local([3] * 4)))
    assert "at the top level of a module" in str(caught.value)
    assert "--num-workers 0" in str(caught.value)


def test_full_shared_memory_is_named() -> None:
    with (
        pytest.raises(RuntimeError, match=r"/dev/shm has \d+ KiB free: make it larger"),
        starting(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), starting():
        raise PermissionError(errno.EACCES, "no")


_SCRIPT = """
import sys
from made_up_data import Records, single_stream
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing.replicas import thread_channels

print("imported by", __name__, flush=True)

class Own(Records):
    pass

if __name__ == "__main__":
    stream = single_stream((Own if sys.argv[1] == "own" else Records)([3] * 8))
    config = PlanConfig(total=8, global_batch_size=8, num_replicas=1, token_budget=64)
    loader = StepLoader(stream, config, channel=thread_channels(1)[0], num_workers=2)
    assert loader.make_step() is not None
    assert loader.make_step() is None
    assert sys.modules["__main__"].__file__ == __file__
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "imported"])
def test_the_main_script_is_imported_only_for_its_classes(tmp_path: Path, kind: str) -> None:
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
    assert ("imported by __mp_main__" in done.stdout) == (kind == "own")
