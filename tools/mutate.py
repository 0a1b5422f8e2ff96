"""Break the package in one place at a time and see that the tests notice.

    python tools/mutate.py [--only WORD] [--jobs 2] [--json OUT]

Works in copies of the tracked files; exits with 1 where a mutant survives, or where the tests that
are to notice it fail without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

__all__ = ["MUTATIONS", "ROOT", "Mutation"]

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 900.0  # a mutant that hangs until then is noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One break.

    Attributes:
        what: goes wrong.
        path: file below `odb_megatron/`.
        old: text that stands there exactly once.
        new: text in its place.
        tests: arguments of pytest that are to fail.
    """

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


_PLAN = ("tests/test_plan_step.py",)
_PARTS = ("tests/test_plan_parts.py",)
_LOOP = ("tests/test_loop.py",)
_SAMPLE = ("tests/test_sample.py",)
_WEIGHTS = ("tests/test_pretrain_weights.py",)

MUTATIONS = (
    # plan_step
    Mutation(
        what="a sample over the budget is let in",
        path="plan/step_planner.py",
        old="if need > one.room or images[unit] > one.images:",
        new="if need > one.room + 1 or images[unit] > one.images:",
        tests=_PLAN,
    ),
    Mutation(
        what="the cap on patches is forgotten",
        path="plan/step_planner.py",
        old="if need > one.room or images[unit] > one.images:",
        new="if need > one.room:",
        tests=_PLAN,
    ),
    Mutation(
        what="samples are not padded",
        path="plan/step_planner.py",
        old="-(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment",
        new="np.asarray(lengths, dtype=np.int64)",
        tests=_PLAN,
    ),
    Mutation(
        what="cheapest first",
        path="plan/step_planner.py",
        old='order = np.argsort(-sums[2], kind="stable")',
        new='order = np.argsort(sums[2], kind="stable")',
        tests=_PLAN,
    ),
    Mutation(
        what="what costs equal does not meet",
        path="plan/step_planner.py",
        old="        bins.sort(key=lambda one: one.load)  # so that equal ones meet\n",
        new="",
        tests=_PLAN,
    ),
    Mutation(
        what="replicas idle while others hold several samples",
        path="plan/step_planner.py",
        old="idle.units = [costliest.units.pop()]",
        new="break",
        tests=_PLAN,
    ),
    Mutation(
        what="groups are torn apart",
        path="plan/step_planner.py",
        old="named = np.where(table[4] < 0,",
        new="named = np.where(table[4] < 1 << 40,",
        tests=_PLAN,
    ),
    Mutation(
        what="shared samples are not aligned",
        path="plan/step_planner.py",
        old="column.sort(key=lambda one: -one.width)",
        new="column.sort(key=lambda one: one.width)",
        tests=_PLAN,
    ),
    Mutation(
        what="samples do not stay where they were read",
        path="plan/step_planner.py",
        old="at = int(tokens[:, home].argmax())",
        new="at = int(tokens[:, home].argmin())",
        tests=_PLAN,
    ),
    # M
    Mutation(
        what="M is no multiple of the virtual pipeline's group",
        path="plan/step_planner.py",
        old="    count = -(-count // count_multiple) * count_multiple\n",
        new="",
        tests=_PLAN,
    ),
    Mutation(
        what="M + 1 is never tried",
        path="plan/step_planner.py",
        old="        count += count_multiple\n    if owner",
        new="        break\n    if owner",
        tests=_PLAN,
    ),
    # blocks
    Mutation(
        what="heavy blocks take from light ones",
        path="plan/blocks.py",
        old="to = min(range(len(loads)), key=lambda at: (loads[at] - fair[at], at))",
        new="to = max(range(len(loads)), key=lambda at: (loads[at] - fair[at], at))",
        tests=_PARTS,
    ),
    # padding rules
    Mutation(
        what="context parallelism's zigzag is forgotten",
        path="plan/padding.py",
        old="zigzag = 2 * context_parallel_size if context_parallel_size > 1 else 1",
        new="zigzag = 1",
        tests=_PARTS,
    ),
    # the loop: read, agree, exchange
    Mutation(
        what="a step forgets the samples before it",
        path="data/loop.py",
        old="                self._consumed += self._num_consumed\n",
        new="",
        tests=_LOOP,
    ),
    Mutation(
        what="the last step is as large as the others",
        path="data/loop.py",
        old="wanted = missing = min(config.global_batch_size, config.total - self._consumed)",
        new="wanted = missing = config.global_batch_size",
        tests=_LOOP,
    ),
    Mutation(
        what="what an empty iterator lacks is not read by others",
        path="data/loop.py",
        old='missing = wanted - int(blocks["rows"].sum())',
        new="missing = 0",
        tests=_LOOP,
    ),
    Mutation(
        what="blocks run different numbers of micro-batches",
        path="data/loop.py",
        old="            if min(counts) == max(counts):\n",
        new="            if min(counts):\n",
        tests=_LOOP,
    ),
    Mutation(
        what="a failure of one replica is kept from the others",
        path="data/loop.py",
        old='header["failed"] = self._closing, self._error is not None',
        new='header["failed"] = self._closing, False',
        tests=_LOOP,
    ),
    Mutation(
        what="samples are read from the wrong place of what arrives",
        path="data/loop.py",
        old="        begin += size\n",
        new="",
        tests=_LOOP,
    ),
    Mutation(
        what="what moves is sent by nobody",
        path="data/loop.py",
        old="(owner == own) & (to == at)",
        new="(owner != own) & (to == at)",
        tests=_LOOP,
    ),
    Mutation(
        what="bad records are not counted together",
        path="data/loop.py",
        old="                self._attempt(self._count_bad, totals)\n",
        new="",
        tests=_LOOP,
    ),
    # between ranks
    Mutation(
        what="samples of another step are taken",
        path="comm/groups.py",
        old="if one != (step, size) and peer != self.replica:",
        new="if one[1] != size and peer != self.replica:",
        tests=("tests/test_comm.py",),
    ),
    Mutation(
        what="news of a rank are not passed on",
        path="comm/heartbeat.py",
        old="            self._pass_on(message, source)\n",
        new="            pass\n",
        tests=("tests/test_heartbeat.py",),
    ),
    Mutation(
        what="a deadline runs while the trainer computes",
        path="comm/heartbeat.py",
        old="waited_s = now - max(trainer, self._since)",
        new="waited_s = now - self._since",
        tests=("tests/test_deadline.py",),
    ),
    # packing, and the loss
    Mutation(
        what="labels are not shifted",
        path="data/sample.py",
        old="        labels=ids[1:],\n",
        new="        labels=ids[:-1],\n",
        tests=_SAMPLE,
    ),
    Mutation(
        what="the scale of weights overflows a step's count",
        path="data/sample.py",
        old="room = max(1, _MAX_COUNT // bound)",
        new="room = max(1, 8 * _MAX_COUNT // bound)",
        tests=_SAMPLE,
    ),
    Mutation(
        what="a sample's weights are not divided by their sum",
        path="data/sample.py",
        old="scale /= float(sample.loss_mask[:keep].sum(dtype=np.float64)) or 1.0",
        new="scale /= 1.0",
        tests=_SAMPLE,
    ),
    Mutation(
        what="the loss forgets its weights",
        path="megatron/forward_step.py",
        old="loss = torch.sum(losses * mask)",
        new="loss = torch.sum(losses * (mask > 0))",
        tests=_WEIGHTS,
    ),
    Mutation(
        what="what is divided by counts tokens, not weights",
        path="megatron/forward_step.py",
        old="count = mask.sum().clone().detach()",
        new="count = (mask > 0).sum().float().detach()",
        tests=_WEIGHTS,
    ),
    # resume
    Mutation(
        what="a resumed run starts at the first sample",
        path="data/loop.py",
        old="self._step, self._consumed, self._num_consumed = 0, start.consumed, 0",
        new="self._step, self._consumed, self._num_consumed = 0, 0, 0",
        tests=("tests/test_step_loader.py",),
    ),
)


def main() -> int:
    """Run the mutants that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="those with this word in path or description")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--json", type=Path, help="write what became of each")
    args = parser.parse_args()
    chosen = [one for one in MUTATIONS if args.only in f"{one.path} {one.what}"]
    with tempfile.TemporaryDirectory(prefix="odb-mutate-") as folder:
        copies = Queue[Path]()
        for number in range(args.jobs):
            copies.put(_copy(Path(folder) / str(number)))

        def run(tests: tuple[str, ...], mutation: Mutation | None = None) -> int:
            copy = copies.get()
            try:
                return _run(copy, tests, mutation)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(args.jobs) as pool:
            suites = sorted({one.tests for one in chosen})
            for tests, status in zip(suites, pool.map(run, suites), strict=True):
                if status:
                    print(f"{' '.join(tests)}: fails without a mutation", file=sys.stderr)
                    return 1
            found = []
            results = pool.map(lambda one: run(one.tests, one), chosen)
            for mutation, status in zip(chosen, results, strict=True):
                # 1: a test has failed; any other status says that none was run.
                outcome = {0: "SURVIVED", 1: "killed"}.get(status, f"not run ({status})")
                print(f"{outcome:10} {mutation.path}: {mutation.what}", flush=True)
                found.append({**asdict(mutation), "outcome": outcome})
    killed = sum(one["outcome"] == "killed" for one in found)
    print(f"{killed} of {len(found)} mutants killed")
    if args.json:
        args.json.write_text(json.dumps({"killed": killed, "mutants": found}, indent=2) + "\n")
    return int(killed < len(found))


def _copy(folder: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _run(copy: Path, tests: tuple[str, ...], mutation: Mutation | None) -> int:
    """Return pytest's exit status: 0 passed, 1 failed."""
    path = copy / "odb_megatron" / (mutation.path if mutation else "__init__.py")
    text = path.read_text(encoding="utf-8")
    if mutation:
        if text.count(mutation.old) != 1:
            raise ValueError(
                f"{mutation.path} has {mutation.old!r} {text.count(mutation.old)} times; expected "
                f"once: follow the code in {Path(__file__).name}"
            )
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return 1
    finally:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
