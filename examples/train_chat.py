"""Train a small GPT on chat data with ODB, on this machine's CPU or GPUs: what `make train` runs.

Prepares data and tokenizer once (kept in `.cache/`), then launches examples/pretrain_gpt_odb.py.
Flags behind the ones below go to that script; a flag given twice counts the second time.

    python examples/train_chat.py --nproc-per-node 2 --odb-overlong drop --train-samples 4000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from odb_megatron.data.chat_record import PlainText, parse_record
from odb_megatron.data.records import Records, open_records
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.elastic import launch

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 4096
TOKENIZER_SAMPLE_BYTES = 8_000_000
SMALL_FILE = 300  # records below which one per cent may be none

TRAIN_FLAGS = shlex.split("""
    --odb --odb-token-budget 4096 --odb-overlong truncate
    --calculate-per-token-loss --micro-batch-size 1 --global-batch-size 32
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 384 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --seq-length 2048
    --max-position-embeddings 2048 --attention-dropout 0 --hidden-dropout 0
    --make-vocab-size-divisible-by 64 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine
    --lr-warmup-fraction 0.05 --clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95
    --eval-interval 32 --log-interval 16 --num-workers 0
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --tokenizer-type HuggingFaceTokenizer
""")


def main() -> int:
    """Prepare, launch, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options] [flags of the script]", allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="JSON or JSONL chat file; default: chitchat")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="prepared files")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="data-parallel replicas")
    parser.add_argument("--device", choices=("cpu", "auto"), default="cpu")
    options, flags = parser.parse_known_args()
    script = [str(ROOT / "examples" / "pretrain_gpt_odb.py"), *TRAIN_FLAGS]
    try:
        data = options.data.resolve() if options.data else chitchat(options.cache)
        tokenizer = tokenizer_for(data, options.cache)
        script += ["--tokenizer-model", str(tokenizer), "--data-path", str(data)]
        script += default_flags(flags, num_records=len(open_records(str(data))))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return launch([*script, *flags], num_processes=options.nproc_per_node, device=options.device)


def chitchat(cache: Path) -> Path:
    """Write the chitchat-dataset package's conversations as JSONL; return the file.

    7168 human conversations (MIT). The sender who speaks first is the user and the other one the
    assistant; who talks alone (3150 conversations) is the assistant, so that nothing is left out.
    """
    target = cache / "chitchat.jsonl"
    if target.exists():
        return target
    from chitchat_dataset import Dataset

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".part{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        for conversation in Dataset().values():
            turns = conversation["messages"]
            senders = list(dict.fromkeys(line["sender"] for turn in turns for line in turn))
            user = senders[0] if len(senders) > 1 else None
            messages = [
                {
                    "role": "user" if turn[0]["sender"] == user else "assistant",
                    "content": "\n".join(line["text"] for line in turn),
                }
                for turn in turns
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    part.replace(target)
    print(f"wrote {target}", flush=True)
    return target


def default_flags(flags: Sequence[str], *, num_records: int) -> list[str]:
    """Return the run length and the split, where the user's flags do not give them.

    Args:
        flags: what the user passes on to the script.
        num_records: records of the data; a small file is trained on whole, without evaluation.
    """
    given = {flag.partition("=")[0] for flag in flags}
    chosen: list[str] = []
    if not given & {"--odb-epochs", "--train-samples", "--train-iters"}:
        chosen += ["--train-samples", "2048"]
    if "--split" not in given:
        if num_records < SMALL_FILE:
            print(f"{num_records} records: all are trained on, none evaluated (--split 100,0,0)")
            return [*chosen, "--split", "100,0,0", "--eval-iters", "0"]
        chosen += ["--split", "98,1,1"]
    return chosen if "--eval-iters" in given else [*chosen, "--eval-iters", "2"]


def tokenizer_for(data: Path, cache: Path) -> Path:
    """Train a byte-level BPE on the data's own text, or return the one trained before."""
    records = open_records(str(data))
    name = hashlib.sha256(f"{records.fingerprint()} {VOCAB_SIZE}".encode()).hexdigest()[:12]
    folder = cache / f"tokenizer-{name}"
    if (folder / "tokenizer_config.json").exists():
        return folder
    return train_bpe(texts_of(records), vocab_size=VOCAB_SIZE, folder=folder)


def texts_of(records: Records) -> Iterator[str]:
    """Yield the text of each usable record, up to a few megabytes."""
    seen = 0
    for index in range(len(records)):
        try:
            record = parse_record(records[index])
        except ValueError:
            continue  # the training run names it, by --odb-max-bad-records
        if isinstance(record, PlainText):
            text = record.text
        else:
            text = "\n".join(str(message.get("content", "")) for message in record.messages)
        yield text
        seen += len(text)
        if seen > TOKENIZER_SAMPLE_BYTES:
            return


if __name__ == "__main__":
    sys.exit(main())
