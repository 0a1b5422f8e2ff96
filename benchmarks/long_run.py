"""Does a long run grow? Processes, threads, files, shared memory and memory over 20 epochs.

One real `pretrain()` run over chats, with workers for train and valid data and an evaluation every
few steps. It is watched from outside, through /proc; the first epochs are not judged.

    python benchmarks/long_run.py --json build/bench/long_run.json
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from common import Launch, ModelSize, data_flags, environment, parser_of, prepare, whole, write_json

MODEL = ModelSize(num_layers=1, hidden=32, num_heads=2, ffn_hidden=64, seq_length=256)
NUM_RECORDS = 320
NOT_JUDGED = 3
"""Epochs until everything has been used once: evaluation, a second pass, full queues."""

MOST_GROWTH = 0.02
"""Of bytes, from the first judged epoch to the last, by a line fitted through all."""

_SAMPLE_S = 0.25
_FLAGS = shlex.split("""
    --odb --odb-token-budget 1024 --odb-overlong truncate --micro-batch-size 1
    --global-batch-size 16 --lr 1e-3 --seed 1234 --eval-interval 7 --eval-iters 2 --num-workers 2
""")


def main(arguments: Sequence[str]) -> int:
    """Run, watch, judge; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--epochs", type=whole(NOT_JUDGED + 2), default=20)
    options = parser.parse_args(arguments)
    data = prepare("chitchat")
    with tempfile.TemporaryDirectory(prefix="odb-long-run-") as folder:
        chats, log, output = (Path(folder) / name for name in ("chats.jsonl", "log", "output.txt"))
        with open(data.path, encoding="utf-8") as source:
            chats.write_text("".join(itertools.islice(source, NUM_RECORDS)), encoding="utf-8")
        flags = [*MODEL.flags(), *_FLAGS, "--odb-epochs", str(options.epochs)]
        flags += data_flags(chats, data.tokenizer, split="90,10,0")
        command = Launch(name="long run", flags=flags, num_replicas=2).command(str(log))
        seen, code = _watch(command, log / "steps-00000.jsonl", output)
        if code:
            print(output.read_text(encoding="utf-8", errors="replace")[-8000:])
            print(f"FAILED: the run ended with exit code {code}")
            return 1
    per_epoch = _by_epoch(seen, options.epochs)
    found = {name: judge([epoch[name] for epoch in per_epoch], name) for name in per_epoch[0]}
    grows = [name for name, one in found.items() if not one["flat"]]
    values = {"epochs": options.epochs, "num_samples": len(seen), "command": command}
    write_json(options.json, {**values, "quantities": found, "grows": grows})
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
    if name.endswith("bytes"):
        flat = line.slope * (len(judged) - 1) <= MOST_GROWTH * judged[0]
    else:
        late = max(1, len(judged) // 4)
        flat = max(judged[-late:]) <= max(judged[:-late])
    ends = {"first": judged[0], "last": judged[-1], "slope_per_epoch": line.slope}
    return {**ends, "flat": flat, "per_epoch": list(values)}


def _watch(
    command: Sequence[str], log: Path, output: Path
) -> tuple[list[tuple[int, Mapping[str, int]]], int]:
    """Run; return (samples consumed, usage) again and again, and the exit code."""
    seen: list[tuple[int, Mapping[str, int]]] = []
    with open(output, "wb") as printed:
        process = subprocess.Popen(
            command, env=environment(), stdout=printed, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None:
            time.sleep(_SAMPLE_S)
            if consumed := _consumed(log):
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


def _usage(pid: int) -> dict[str, int]:
    """Return what all processes of a run use together; memory that several share counts once."""
    found = dict.fromkeys(("processes", "threads", "file_descriptors", "memory_bytes"), 0)
    for one in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            used = (1, one.num_threads(), one.num_fds(), one.memory_full_info().pss)
            found = {
                name: num + more for (name, num), more in zip(found.items(), used, strict=True)
            }
    shared = list(os.scandir("/dev/shm"))
    size = 0
    for entry in shared:
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat().st_size
    return {**found, "shm_files": len(shared), "shm_bytes": size}


def _tree(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def _by_epoch(seen: Sequence[tuple[int, Mapping[str, int]]], epochs: int) -> list[dict[str, float]]:
    """Return the largest count and the median of bytes in each epoch."""
    total = max(consumed for consumed, _ in seen)
    groups: list[list[Mapping[str, int]]] = [[] for _ in range(epochs)]
    for consumed, usage in seen:
        groups[min(epochs - 1, consumed * epochs // (total + 1))].append(usage)
    if not all(groups):
        times = [len(group) for group in groups]
        raise RuntimeError(f"an epoch passed without being looked at ({times} times)")
    return [
        {
            name: (statistics.median if name.endswith("bytes") else max)(
                [usage[name] for usage in group]
            )
            for name in group[0]
        }
        for group in groups
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
