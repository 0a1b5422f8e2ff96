"""Train a small GPT with a vision tower on pictures, on the CPU or on GPUs.

Writes what `pretrain_pictures.py` needs into --cache and runs it; flags not listed here go to that
script. The default pictures are drawn at run time, always the same ones. `--pictures real` takes
photographs that come inside the package scikit-image, which must be installed; they stay there.

    python examples/multimodal/train_pictures.py
    python examples/multimodal/train_pictures.py --pictures real
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from odb_megatron.data.pictures import IMAGE_TOKEN
from odb_megatron.data.tokenizer import train_bpe
from odb_megatron.elastic import launch

ROOT = Path(__file__).resolve().parents[2]
NUM_MADE = 320
EPOCHS = {"made": 2, "real": 20}
"""Of 20 steps and of one: there are few photographs."""

COLOURS = {
    "red": (200, 30, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 200),
    "yellow": (230, 210, 50),
}
SHAPES = ("circle", "square", "bar")
NUMBERS = ("one", "two", "three")
REAL = {
    "astronaut.png": "a woman in an orange space suit",  # NASA, public domain
    "brick.png": "a wall of bricks",  # CC0
    "chelsea.png": "the face of a cat",  # CC0
    "coffee.png": "a cup of coffee on a saucer",  # CC0
    "grass.png": "a lawn seen from above",  # CC0
    "gravel.png": "small stones",  # CC0
    "hubble_deep_field.jpg": "galaxies far away",  # NASA, public domain
    "rocket.jpg": "a rocket on its launch pad",  # SpaceX, public domain
}
"""Photographs in skimage/data, with their licences (docstrings of skimage/data/_fetchers.py)."""

TRAIN_FLAGS = shlex.split("""
    --odb --odb-token-budget 512 --odb-max-patches 512
    --odb-image-max-pixels 25088 --vision-hidden-size 64 --vision-layers 2
    --calculate-per-token-loss --micro-batch-size 1 --global-batch-size 16
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --swiglu
    --normalization RMSNorm --disable-bias-linear --seq-length 256 --max-position-embeddings 256
    --position-embedding-type mrope --mrope-section 4 6 6 --no-rope-fusion
    --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 64
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --clip-grad 1.0
    --log-interval 4 --eval-interval 1000 --eval-iters 0 --split 100,0,0 --num-workers 0
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --tokenizer-type HuggingFaceTokenizer
""")


def main() -> int:
    """Prepare, launch, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options] [flags of the script]", allow_abbrev=False
    )
    parser.add_argument("--pictures", choices=("made", "real"), default="made")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="prepared files")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="data-parallel replicas")
    parser.add_argument("--device", choices=("cpu", "auto"), default="cpu")
    options, flags = parser.parse_known_args()
    folder = options.cache / f"pictures-{options.pictures}"
    script = [str(Path(__file__).with_name("pretrain_pictures.py")), *TRAIN_FLAGS]
    try:
        make = made_pictures if options.pictures == "made" else real_pictures
        data, pictures, answers = make(folder)
        tokenizer = picture_tokenizer(answers, folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    script += ["--data-path", str(data), "--odb-image-folder", str(pictures)]
    script += ["--tokenizer-model", str(tokenizer)]
    if not {flag.partition("=")[0] for flag in flags} & {"--odb-epochs", "--train-samples"}:
        script += ["--odb-epochs", str(EPOCHS[options.pictures])]
    return launch([*script, *flags], num_processes=options.nproc_per_node, device=options.device)


def made_pictures(folder: Path, num: int = NUM_MADE) -> tuple[Path, Path, list[str]]:
    """Draw pictures of many sizes; return the chat file, the picture folder and the answers.

    A record has one or two pictures, and the answers say what is on them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator, records = random.Random(7), []
    for at in range(num):
        parts, seen = [], []
        for number in range(generator.choice((1, 1, 2))):
            size = tuple(round(generator.lognormvariate(4.4, 0.5)) + 28 for _ in range(2))
            colour, shape = generator.choice(list(COLOURS)), generator.choice(SHAPES)
            count = generator.randint(1, 3)
            name = f"{at:04d}-{number}.png"
            _draw(folder / name, size=size, colour=colour, shape=shape, count=count)
            parts.append({"type": "image_url", "image_url": {"url": name}})
            seen.append(f"{NUMBERS[count - 1]} {colour} {shape}{'s' if count > 1 else ''}")
        records.append(_chat(parts, " then ".join(seen)))
    return _write(folder, records), folder, [_answer(record) for record in records]


def real_pictures(folder: Path) -> tuple[Path, Path, list[str]]:
    """As `made_pictures`, of the photographs in scikit-image; each alone, and in pairs.

    Raises:
        ValueError: it is not installed, or has other pictures.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--pictures real needs scikit-image: pip install scikit-image")
    pictures = Path(spec.submodule_search_locations[0]) / "data"
    names = [name for name in REAL if (pictures / name).is_file()]
    if len(names) < 2:
        raise ValueError(f"{pictures} has none of {', '.join(REAL)}: install scikit-image 0.26")
    records = [_chat([{"type": "image", "path": name}], REAL[name]) for name in names]
    for first, second in zip(names, [*names[1:], names[0]], strict=True):
        parts = [{"type": "image", "path": name} for name in (first, second)]
        records.append(_chat(parts, f"{REAL[first]} then {REAL[second]}"))
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder, records), pictures, [_answer(record) for record in records]


def picture_tokenizer(answers: Iterable[str], folder: Path) -> Path:
    """Train a BPE on the answers, and give it the tokens around and at pictures."""
    from transformers import AutoTokenizer

    texts = ["user assistant what is this", *answers]
    trained = train_bpe(texts, vocab_size=500, folder=folder / "text-tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(trained), local_files_only=True)
    tokens = ["<|vision_start|>", IMAGE_TOKEN, "<|vision_end|>"]
    tokenizer.add_tokens(tokens, special_tokens=True)
    target = folder / "tokenizer"
    tokenizer.save_pretrained(str(target))
    return target


def _chat(parts: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    user = [*parts, {"type": "text", "text": "what is this"}]
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def _answer(record: dict[str, Any]) -> str:
    return str(record["messages"][-1]["content"])


def _write(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _draw(path: Path, *, size: tuple[int, ...], colour: str, shape: str, count: int) -> None:
    from PIL import Image, ImageDraw

    width, height = size
    picture = Image.new("RGB", (width, height), (235, 235, 230))
    pen = ImageDraw.Draw(picture)
    step = width // count
    side = max(4, min(step, height) * 2 // 3)
    for at in range(count):
        left, top = at * step + (step - side) // 2, (height - side) // 2
        if shape == "circle":
            pen.ellipse([left, top, left + side, top + side], fill=COLOURS[colour])
        else:
            high = side if shape == "square" else max(2, side // 4)
            pen.rectangle([left, top, left + side, top + high], fill=COLOURS[colour])
    picture.save(path)


if __name__ == "__main__":
    sys.exit(main())
