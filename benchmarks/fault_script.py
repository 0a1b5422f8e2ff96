"""A pretrain script in which one thing goes wrong: `fault_script.py KIND RANK FOLDER [FLAGS...]`.

As examples/pretrain_gpt_odb.py on the CPU device layer. The kinds:

- `killed_in_step` and `killed_planning`: RANK ends by SIGKILL;
- `device_call`: the same, while the others are in a call that no signal or error ends;
- `leaves_in_step` and `leaves_between`: RANK calls sys.exit(0) in a step, or after it;
- `waits`: RANK notes that it is in a step, for whoever stops or signals it;
- `armed`: `faulthandler.dump_traceback_later` is running;
- `slow`: RANK takes SLOW_S seconds for its first evaluation, and for its first checkpoint;
- `worker_raises`, `worker_killed`, `worker_stopped`, `worker_hangs`, `worker_none`: what becomes of
  the data-loader worker that is asked for the bad item, or of the item.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT_STEP, BAD_ITEM = 4, 45
SLOW_S = float(os.environ.get("SLOW_S", "0"))


def mark(folder: str, name: str = "fault") -> None:
    """Note that it happens now."""
    target = Path(folder) / name
    if not target.exists():
        scratch = target.with_suffix(f".{os.getpid()}")
        scratch.write_text(f"{time.time()} {os.getpid()}", encoding="utf-8")
        scratch.replace(target)


def kill_self(folder: str, number: int = signal.SIGKILL) -> None:
    """End, or stop, by a signal."""
    mark(folder)
    os.kill(os.getpid(), number)


def leave(folder: str) -> None:
    """End as a script that has done its work."""
    mark(folder)
    sys.exit(0)


class FaultyDataset:
    """Random items of 8 to 60 tokens, one of which is bad.

    Args:
        size: number of items.
        kind: of the fault.
        folder: where its moment is noted.
    """

    def __init__(self, size: int, *, kind: str, folder: str) -> None:
        self._size, self._kind, self._folder = size, kind, folder

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index == BAD_ITEM and self._kind.startswith("worker_"):
            mark(self._folder)
            match self._kind:
                case "worker_raises":
                    raise KeyError("no such image: 4711.png")
                case "worker_killed" | "worker_stopped" as kind:
                    stops = kind == "worker_stopped"
                    kill_self(self._folder, signal.SIGSTOP if stops else signal.SIGKILL)
                case "worker_hangs":
                    time.sleep(3600)
            return None
        made = random.Random(index)
        tokens = [made.randrange(1, 100) for _ in range(made.randint(8, 60))]
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": [1] * (len(tokens) - 1)}


def main() -> None:
    """Run the script."""
    kind, victim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sys.argv[1:4] = []
    faulthandler.register(signal.SIGUSR1)  # prints where a rank is that does not end
    if kind == "armed":
        faulthandler.dump_traceback_later(3600)
    from odb_megatron.testing import cpu_device

    cpu_device.activate()
    from megatron.training import training

    from odb_megatron.comm.groups import SourceGroup
    from odb_megatron.megatron import replica
    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import parse_and_validate_args

    if "GRACE_S" in os.environ:  # tests of many victims would wait for it each time
        replica._GRACE_S = float(os.environ["GRACE_S"])
    args = parse_and_validate_args({"tokenizer_type": "NullTokenizer"})
    is_victim = args.rank == victim
    steps, slow_s = iter(range(1, 1000)), iter([SLOW_S])

    def gathering(group: Any, _record: bytes) -> None:
        if group._rounds == FAULT_STEP and "train" in group._gather:
            kill_self(folder)

    def saving(*_arguments: Any, **_named: Any) -> None:
        time.sleep(next(slow_s, 0))

    def logging(*_arguments: Any, **_named: Any) -> None:
        if next(steps) == FAULT_STEP:
            leave(folder)

    match kind, is_victim:
        case "killed_planning", True:
            _with(SourceGroup, "gather", before=gathering)
        case "device_call", True:
            threading.Thread(target=_killed_once_stuck, args=(folder,), daemon=True).start()
        case "slow", True:
            _with(training, "save_checkpoint", before=saving)
        case "leaves_between", True:
            _with(training, "training_log", after=logging)
    data = FaultyDataset(args.train_samples, kind=kind, folder=folder)
    with OdbRun(args, datasets=lambda _: [data, data, None]) as run:
        step = _watched(run.forward_step, args, kind=kind, is_victim=is_victim, folder=folder)
        run.pretrain(forward_step=step)


def _nothing(*_arguments: Any, **_named: Any) -> None:
    return None


def _with(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] = _nothing,
    after: Callable[..., None] = _nothing,
) -> None:
    """Have something done before or after a function is called, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)  # hooks look at its signature
    def replacement(*arguments: Any, **named: Any) -> Any:
        before(*arguments, **named)
        result = original(*arguments, **named)
        after(*arguments, **named)
        return result

    setattr(owner, name, replacement)


def _watched(
    forward_step: Callable[..., Any], args: Any, *, kind: str, is_victim: bool, folder: str
) -> Callable[..., Any]:
    import torch

    slow_s = iter([SLOW_S] if kind == "slow" and is_victim else [])

    def watched(*arguments: Any) -> Any:
        is_training = torch.is_grad_enabled()
        is_time = is_training and args.curr_iteration + 1 == FAULT_STEP
        match kind, is_victim:
            case "killed_in_step", True if is_time:
                kill_self(folder)
            case "leaves_in_step", True if is_time:
                leave(folder)
            case "device_call", False if is_time:
                mark(folder, "stuck")
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                while True:  # as a collective on the device whose peer is gone
                    ctypes.CDLL(None).sleep(1000)
            case "waits" | "armed", True if is_time:
                mark(folder)
        if kind == "waits" and is_training:
            time.sleep(0.2)
        if not is_training:
            time.sleep(next(slow_s, 0))
        return forward_step(*arguments)

    return watched


def _killed_once_stuck(folder: str) -> None:
    while not (Path(folder) / "stuck").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    kill_self(folder)


if __name__ == "__main__":
    main()
