"""Replicas that stay alive and run `pretrain()` again and again; the data they train on.

Starting processes takes ten seconds, a run about one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import re
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from megatron_run import CASE_TIMEOUT_S, Case, Outcome, serve

__all__ = [
    "GLOBAL_BATCH_SIZE",
    "LEFT",
    "SEQ_LENGTH",
    "WORDS",
    "ChatFile",
    "Megatron",
    "Run",
    "Step",
    "chat_file",
    "write_chats",
]

SEQ_LENGTH = 64
GLOBAL_BATCH_SIZE = 8

LEFT = "the script has left by sys.exit() within a step"

MAX_THREADS = 100
"""A process with more is replaced: groups of its last runs are alive, with three threads each that
wake a hundred times a second. `forget_run` ends those of the runs tested so far."""

_FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 64
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --num-workers 0 --seed 1234
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1.0
    --micro-batch-size 1 --calculate-per-token-loss --eval-interval 1000 --log-interval 1
""")

WORDS = shlex.split("red green blue one two three north south east west yes no")
_LINE = re.compile(
    r"iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \|.*?learning rate: (\S+) \| "
    r"global batch size: +(\d+) \| lm loss: (\S+) \|.*?skipped iterations: +(\d+) \| "
    r"number of nan iterations: +(\d+)"
)
_EVALUATION = re.compile(r"validation loss at (.*?) \| lm loss value: (\S+) \|")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFile:
    """A JSONL file of conversations, with what a hand count says of each record.

    Attributes:
        path: the file.
        lengths: tokens of each record's sample (one fewer than of its text).
        loss_tokens: tokens the assistant writes, `<|im_end|>` included.
    """

    path: str
    lengths: tuple[int, ...]
    loss_tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def sums(self, ids: Sequence[str]) -> tuple[int, int, int]:
        """(tokens, squared tokens, loss tokens) of samples named as in the step log."""
        records = [int(name.partition(":")[2].partition("@")[0]) for name in ids]
        lengths = [self.lengths[record] for record in records]
        loss = sum(self.loss_tokens[record] for record in records)
        return sum(lengths), sum(length**2 for length in lengths), loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step, seen from all replicas."""

    iteration: int
    ids: tuple[tuple[str, ...], ...]
    loss: float
    record: dict[str, Any]

    @property
    def all_ids(self) -> list[str]:
        """Samples of all replicas, sorted."""
        return sorted(name for replica in self.ids for name in replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """What Megatron prints of an iteration."""

    iteration: int
    train_iters: int
    consumed: int
    learning_rate: float
    global_batch_size: int
    loss: float
    skipped: int
    nan: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of `pretrain()` on all replicas."""

    replicas: list[Outcome]

    @property
    def steps(self) -> list[Step]:
        """The step logs of all replicas, joined; of a replica's ranks its source rank has one."""
        joined = []
        logs = [replica.steps for replica in self.replicas if replica.steps]
        for records in zip(*logs, strict=True):
            assert len({record["iteration"] for record in records}) == 1
            assert len({record["loss"] for record in records}) == 1
            ids = tuple(tuple(chain.from_iterable(record["ids"])) for record in records)
            first = records[0]
            joined.append(
                Step(iteration=first["iteration"], ids=ids, loss=first["loss"], record=first)
            )
        return joined

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def all_ids(self) -> list[str]:
        """Every sample of the run, sorted."""
        return sorted(name for step in self.steps for name in step.all_ids)

    @property
    def lines(self) -> list[LogLine]:
        """Megatron's own line of each iteration (its last rank prints it)."""
        return [
            LogLine(
                iteration=int(found[1]),
                train_iters=int(found[2]),
                consumed=int(found[3]),
                learning_rate=float(found[4]),
                global_batch_size=int(found[5]),
                loss=float(found[6]),
                skipped=int(found[7]),
                nan=int(found[8]),
            )
            for found in _LINE.finditer(self.replicas[-1].output)
        ]

    @property
    def evaluations(self) -> list[tuple[str, float]]:
        """(where, loss) of each evaluation, as Megatron prints it."""
        output = self.replicas[-1].output
        return [(found[1], float(found[2])) for found in _EVALUATION.finditer(output)]

    @property
    def summary(self) -> str:
        """What is printed when the run is over, on replica 0."""
        output = self.replicas[0].output
        return output[output.rindex("optimizer step") :] if "optimizer step" in output else ""

    @property
    def evaluated(self) -> list[list[int]]:
        """Stream positions that each replica evaluated, in order."""
        return [[p for batch in replica.eval_ids for p in batch] for replica in self.replicas]


@dataclass(slots=True)
class _World:
    """Replicas in processes of one gloo group."""

    ends: list[Any]
    done: Future[Any]

    @classmethod
    def start(cls, num_replicas: int, pool: ThreadPoolExecutor) -> _World:
        from odb_megatron.testing.gloo import run_replicas

        pipes = [multiprocessing.Pipe() for _ in range(num_replicas)]
        done = pool.submit(
            run_replicas,
            serve,
            num_replicas,
            [theirs for _, theirs in pipes],
            timeout_s=3600,
            device_layer=True,
        )
        return cls([mine for mine, _ in pipes], done)

    def run(self, case: Case) -> list[Outcome]:
        for end in self.ends:
            end.send(case)
        deadline = time.monotonic() + CASE_TIMEOUT_S + 60
        outcomes: list[Outcome] = []
        try:
            for end in self.ends:
                outcomes.append(self._receive(end, deadline))
        except Exception as error:
            for rank, outcome in enumerate(outcomes):
                error.add_note(f"rank {rank}: {outcome.trace or outcome.output[-3000:]}")
            with contextlib.suppress(OSError):
                for end in self.ends:
                    end.send(None)
            raise
        return outcomes

    def stop(self) -> None:
        if not self.done.done():
            for end in self.ends:
                end.send(None)
        self.done.result(timeout=60)

    def _receive(self, end: Any, deadline: float) -> Outcome:
        while not end.poll(0.2):
            if self.done.done():
                self.done.result()  # raises what ended the replicas
            if time.monotonic() > deadline:
                raise TimeoutError("no result of a run in time")
        received: Outcome = end.recv()
        return received


@dataclass(slots=True)
class Megatron:
    """Runs `pretrain()` with the tests' flags; processes are started when first needed."""

    folder: Path
    tokenizer: str
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))
    _worlds: dict[int, _World] = field(default_factory=dict)
    _num_runs: int = 0

    def run(self, *flags: Any, replicas: int = 2, items: Any = None, **case: Any) -> Run:
        """Run and return what happened; later flags override the tests' own.

        Args:
            flags: of the script.
            replicas: processes; several make one replica under tensor, pipeline or context
                parallelism.
            items: see `Case`, which also has the other arguments.
        """
        if replicas not in self._worlds:
            self._worlds[replicas] = _World.start(replicas, self._pool)
        made = Case(flags=self.command_line(*flags), items=items, **case)
        world = self._worlds.pop(replicas)  # lost where it raises: what it would send next is stale
        run = Run(replicas=world.run(made))
        if max(outcome.threads_in_all for outcome in run.replicas) > MAX_THREADS:
            world.stop()
        elif any(LEFT in outcome.error for outcome in run.replicas):
            with contextlib.suppress(Exception):  # its watchdog may be quicker: exit code 75
                world.stop()
        else:
            self._worlds[replicas] = world
        return run

    def command_line(self, *flags: Any) -> tuple[str, ...]:
        """The script's whole command line, with a step log of its own."""
        self._num_runs += 1
        return (
            *_FLAGS,
            *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
            *("--global-batch-size", str(GLOBAL_BATCH_SIZE)),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer),
            *("--odb-log-dir", str(self.log_folder)),
            *(str(flag) for flag in flags),
        )

    @property
    def log_folder(self) -> Path:
        """Where the last run's step log is, unless its flags said otherwise."""
        return self.folder / f"log{self._num_runs}"

    def last_log(self, name: str) -> str:
        """Return a file of the last run's log folder."""
        return (self.log_folder / name).read_text(encoding="utf-8")

    def train(self, *flags: Any, replicas: int = 2, items: Any = None, **case: Any) -> Run:
        """As `run`, for a run that must end without an error."""
        run = self.run(*flags, replicas=replicas, items=items, **case)
        for rank, outcome in enumerate(run.replicas):
            if outcome.error:
                pytest.fail(f"replica {rank}: {outcome.output[-3000:]}\n{outcome.trace}")
            assert outcome.restored, "a name that ODB replaces was not put back"
        return run

    def refused(self, *flags: Any, replicas: int = 2, items: Any = None, **case: Any) -> list[str]:
        """As `run`, for a run that must fail on every replica; return the errors."""
        run = self.run(*flags, replicas=replicas, items=items, **case)
        assert all(outcome.error for outcome in run.replicas), [o.output for o in run.replicas]
        assert all(outcome.restored for outcome in run.replicas)
        return [outcome.error for outcome in run.replicas]

    def killed(self, *flags: Any, killed_in: int, replicas: int = 2) -> list[Step]:
        """Run in processes of their own, all killed by SIGKILL in a step; return the steps logged.

        Args:
            flags: of the script.
            killed_in: iteration in whose first micro-batch they are killed.
            replicas: processes.
        """
        from odb_megatron.testing.gloo import ReplicaError

        case = Case(flags=self.command_line(*flags), killed_in=killed_in)
        world = _World.start(replicas, self._pool)
        with pytest.raises(ReplicaError, match="exit code -9"):
            world.run(case)
        logs = [
            [line for line in map(json.loads, path.open()) if "format" not in line]
            for path in sorted(self.log_folder.glob("*.jsonl"))
        ]
        return Run(replicas=[Outcome(steps=log) for log in logs]).steps

    def stop(self) -> None:
        """End the processes; others are started when needed again."""
        for world in self._worlds.values():
            world.stop()
        self._worlds.clear()


def chat_file(
    folder: Path, *, name: str, num_records: int, seed: int, longest: int = SEQ_LENGTH
) -> ChatFile:
    """Write conversations of widely varied lengths, up to `longest` tokens."""
    generator = random.Random(seed)
    records = []
    for _ in range(num_records):
        words = min(longest - 18, int(generator.lognormvariate(2.0, 1.0)) + 2)
        asked = generator.randint(1, max(1, words // 3))
        records.append((_text(generator, asked), _text(generator, words - asked)))
    return write_chats(folder, name=name, records=records)


def write_chats(folder: Path, *, name: str, records: Sequence[tuple[str, str]]) -> ChatFile:
    """Write one conversation per (question, answer), and count its tokens by hand."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    lengths, loss_tokens = [], []
    path = folder.parent / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for question, answer in records:
            turns = [("user", question), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
            text = "".join(f"<|im_start|>{r}\n{content}<|im_end|>\n" for r, content in turns)
            lengths.append(count(text) - 1)
            loss_tokens.append(count(answer + "<|im_end|>"))
    return ChatFile(path=str(path), lengths=tuple(lengths), loss_tokens=tuple(loss_tokens))


def _text(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(num_words))
