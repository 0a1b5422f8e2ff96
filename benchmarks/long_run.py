"""Does a long run grow? Processes, threads, files, shared memory and memory over 20 epochs.

One real `pretrain()` run over chats, with workers for train and valid data and an evaluation every
few steps. It is watched from outside, through /proc; the first epochs are not judged. Must not look
into the run's processes in any other way.

    python benchmarks/long_run.py --json build/bench/long_run.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil
from chat_data import prepare
from flags import output_file, whole
from training_runs import Launch, ModelSize, data_flags, write_json

MODEL = ModelSize(num_layers=1, hidden=32, num_heads=2, ffn_hidden=64, seq_length=256)
NUM_REPLICAS = 2
NUM_WORKERS = 2
NUM_RECORDS = 320
NOT_JUDGED = 3
"""Epochs until everything has been used once: evaluation, a second pass, full queues."""

MOST_GROWTH = 0.02
"""Of bytes, from the first judged epoch to the last, by a line fitted through all."""

_SAMPLE_S = 0.25
_FLAGS = shlex.split("""
    --odb --odb-token-budget 1024 --odb-overlong truncate --micro-batch-size 1
    --global-batch-size 16 --lr 1e-3 --seed 1234 --eval-interval 7 --eval-iters 2
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What all processes of the run use together.

    Attributes:
        processes: their number.
        threads: of all of them.
        file_descriptors: of all of them.
        shm_files: entries of /dev/shm.
        shm_bytes: their size.
        memory_bytes: proportional set size of all of them; pages that several share count once.
    """

    processes: int
    threads: int
    file_descriptors: int
    shm_files: int
    shm_bytes: int
    memory_bytes: int


_NAMES = tuple(field.name for field in fields(Usage))


def main(arguments: Sequence[str]) -> int:
    """Run, watch, judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=whole(NOT_JUDGED + 2), default=20)
    parser.add_argument("--json", type=output_file, default=None)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="odb-long-run-") as folder:
        command, log = _command(Path(folder), options)
        output = Path(folder) / "output.txt"
        seen, code = _watch(command, log, output)
        if code:
            print(output.read_text(encoding="utf-8", errors="replace")[-8000:])
            print(f"FAILED: the run ended with exit code {code}")
            return 1
    per_epoch = _by_epoch(seen, options.epochs)
    found = {name: judge([epoch[name] for epoch in per_epoch], name) for name in _NAMES}
    grows = [name for name, one in found.items() if not one["flat"]]
    write_json(
        options.json,
        {
            "epochs": options.epochs,
            "num_samples": len(seen),
            "command": command,
            "quantities": found,
            "grows": grows,
        },
    )
    for name, one in found.items():
        print(f"  {name}: {one['first']} to {one['last']}, {'flat' if one['flat'] else 'GROWS'}")
    print(f"FAILED: {', '.join(grows)} grow" if grows else "nothing grows")
    return 1 if grows else 0


def judge(values: Sequence[float], name: str) -> dict[str, object]:
    """Say whether a quantity grows, from its value in each epoch.

    Bytes may end `MOST_GROWTH` above where they began; what is counted must not, in the last
    quarter, exceed its largest value before.

    Args:
        values: one per epoch, the first `NOT_JUDGED` included.
        name: of the quantity.
    """
    judged = list(values[NOT_JUDGED:])
    line = statistics.linear_regression(range(len(judged)), judged)
    growth = line.slope * (len(judged) - 1)
    if name.endswith("bytes"):
        flat = growth <= MOST_GROWTH * judged[0]
    else:
        late = max(1, len(judged) // 4)
        flat = max(judged[-late:]) <= max(judged[:-late])
    return {
        "first": judged[0],
        "last": judged[-1],
        "slope_per_epoch": line.slope,
        "flat": flat,
        "per_epoch": list(values),
    }


def _command(folder: Path, options: argparse.Namespace) -> tuple[list[str], Path]:
    data = prepare("chitchat")
    chats = folder / "chats.jsonl"
    with open(data.path, encoding="utf-8") as source:
        chats.write_text("".join(itertools.islice(source, NUM_RECORDS)), encoding="utf-8")
    flags = [*MODEL.flags(), *_FLAGS]
    flags += ["--odb-epochs", str(options.epochs), "--num-workers", str(NUM_WORKERS)]
    flags += data_flags(chats, data.tokenizer, split="90,10,0")
    log = folder / "log"
    launch = Launch(name="long run", flags=flags, num_replicas=NUM_REPLICAS)
    return launch.command(str(log)), log / "steps-00000.jsonl"


def _watch(command: Sequence[str], log: Path, output: Path) -> tuple[list[tuple[int, Usage]], int]:
    """Run; return (samples consumed, usage) again and again, and the exit code."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    seen: list[tuple[int, Usage]] = []
    with open(output, "wb") as printed:
        process = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None:
            time.sleep(_SAMPLE_S)
            consumed = _consumed(log)
            if consumed:
                seen.append((consumed, _usage(process.pid)))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
    return seen[:-1], process.wait()  # the last one may have seen the end


def _consumed(log: Path) -> int:
    """Return the samples consumed by the last whole line of a step log."""
    if not log.exists():
        return 0
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 16)))
        lines = file.read().split(b"\n")[1:-1]
    return int(json.loads(lines[-1]).get("consumed_samples", 0)) if lines else 0


def _usage(pid: int) -> Usage:
    processes = threads = files = memory = 0
    for one in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            used = one.memory_full_info().pss, one.num_threads(), one.num_fds()
            memory, threads, files = memory + used[0], threads + used[1], files + used[2]
            processes += 1
    shared = list(os.scandir("/dev/shm"))
    sizes = 0
    for entry in shared:
        with contextlib.suppress(FileNotFoundError):
            sizes += entry.stat().st_size
    return Usage(
        processes=processes,
        threads=threads,
        file_descriptors=files,
        shm_files=len(shared),
        shm_bytes=sizes,
        memory_bytes=memory,
    )


def _tree(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def _by_epoch(seen: Sequence[tuple[int, Usage]], epochs: int) -> list[dict[str, float]]:
    """Return the largest count and the median of bytes in each epoch."""
    total = max(consumed for consumed, _ in seen)
    groups: list[list[dict[str, int]]] = [[] for _ in range(epochs)]
    for consumed, usage in seen:
        groups[min(epochs - 1, consumed * epochs // (total + 1))].append(asdict(usage))
    if not all(groups):
        raise RuntimeError(
            f"an epoch passed without being looked at ({[len(group) for group in groups]} times)"
        )
    return [
        {
            name: (statistics.median if name.endswith("bytes") else max)(
                [usage[name] for usage in group]
            )
            for name in _NAMES
        }
        for group in groups
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
