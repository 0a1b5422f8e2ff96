"""A pretrain script in which one thing goes wrong: `fault_script.py KIND RANK FOLDER [FLAGS...]`.

As examples/pretrain_gpt_odb.py on the CPU device layer, with `fault_data` as its data. The kinds:
`killed_in_step` and `killed_planning` (RANK ends by SIGKILL), `device_call` (the same, while the
others are in a call that no signal or error ends), `leaves_in_step` and `leaves_between` (RANK
calls sys.exit(0) in a step, or after it), `waits` (RANK notes that it is in a step, for whoever
stops or signals it), `armed` (`faulthandler.dump_traceback_later` is running), `slow` (RANK takes
SLOW_S seconds for its first evaluation, and for its first checkpoint), and those of `fault_data`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_data import FaultyDataset, mark

from odb_megatron.testing import cpu_device

FAULT_STEP = 4
SLOW_S = float(os.environ.get("SLOW_S", "0"))


def main() -> None:
    """Run the script."""
    kind, victim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sys.argv[1:4] = []
    faulthandler.register(signal.SIGUSR1)  # prints where a rank is that does not end
    if kind == "armed":
        faulthandler.dump_traceback_later(3600)
    cpu_device.activate()
    from megatron.training import training

    from odb_megatron.megatron import replica
    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import parse_and_validate_args

    if "GRACE_S" in os.environ:  # tests of many victims would wait for it each time
        replica._GRACE_S = float(os.environ["GRACE_S"])
    args = parse_and_validate_args({"tokenizer_type": "NullTokenizer"})
    is_victim = args.rank == victim
    fault = kind.removeprefix("worker_") if kind.startswith("worker_") else ""
    data = FaultyDataset(args.train_samples, fault=fault, folder=folder)
    if kind == "killed_planning" and is_victim:
        _killed_in_gather(folder)
    if kind == "device_call" and is_victim:
        threading.Thread(target=_killed_once_stuck, args=(folder,), daemon=True).start()
    if kind == "slow" and is_victim:
        _slow_save(training)
    if kind == "leaves_between" and is_victim:
        _leaves_between(training, folder)
    with OdbRun(args, datasets=lambda _: [data, data, None]) as run:
        step = _watched(run.forward_step, args, kind=kind, is_victim=is_victim, folder=folder)
        run.pretrain(forward_step=step)


def _watched(
    forward_step: Callable[..., Any], args: Any, *, kind: str, is_victim: bool, folder: str
) -> Callable[..., Any]:
    import torch

    slow_s = [SLOW_S] if kind == "slow" and is_victim else []

    def watched(*arguments: Any) -> Any:
        is_time = torch.is_grad_enabled() and args.curr_iteration + 1 == FAULT_STEP
        if is_time and kind == "killed_in_step" and is_victim:
            mark(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        if is_time and kind == "leaves_in_step" and is_victim:
            mark(folder)
            sys.exit(0)
        if is_time and kind == "device_call" and not is_victim:
            mark(folder, "stuck")
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            while True:  # as a collective on the device whose peer is gone
                ctypes.CDLL(None).sleep(1000)
        if is_time and kind in ("waits", "armed") and is_victim:
            mark(folder)
        if kind == "waits" and torch.is_grad_enabled():
            time.sleep(0.2)
        if slow_s and not torch.is_grad_enabled():
            time.sleep(slow_s.pop())
        return forward_step(*arguments)

    return watched


def _killed_once_stuck(folder: str) -> None:
    while not (Path(folder) / "stuck").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    mark(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_in_gather(folder: str) -> None:
    from odb_megatron.comm.groups import SourceGroup

    original = SourceGroup.gather

    def gather(self: SourceGroup, record: bytes) -> list[bytes]:
        if self._gather == "train gather" and self._rounds == FAULT_STEP:
            mark(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, record)

    SourceGroup.gather = gather  # type: ignore[method-assign]


def _leaves_between(training: Any, folder: str) -> None:
    original, num_logged = training.training_log, [0]

    @functools.wraps(original)  # hooks look at its signature
    def training_log(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        num_logged[0] += 1
        if num_logged[0] == FAULT_STEP:
            mark(folder)
            sys.exit(0)
        return result

    training.training_log = training_log


def _slow_save(training: Any) -> None:
    original, slow_s = training.save_checkpoint, [SLOW_S]

    def save_checkpoint(*arguments: Any, **named: Any) -> Any:
        if slow_s:
            time.sleep(slow_s.pop())
        return original(*arguments, **named)

    training.save_checkpoint = save_checkpoint


if __name__ == "__main__":
    main()
