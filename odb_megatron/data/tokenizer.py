"""Tokenizers: found inside Megatron's tokenizer object, loaded from a folder or file, or trained.

Must not download anything, run code that comes with a tokenizer, or read Megatron's arguments.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_megatron.data.chat import CHATML_TEMPLATE, TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "MegatronTextTokenizer",
    "adds_special_tokens",
    "hf_tokenizer",
    "load_tokenizer",
    "tokenizer_folder",
    "train_bpe",
    "usable_tokenizer",
]

END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>")
"""Names looked for, in this order, as the EOS token of a bare `tokenizer.json`."""
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<unk>")
"""Names looked for, in this order, as its padding token."""

_END, _PAD = "<|endoftext|>", "<|pad|>"
_SPECIAL_TOKENS = (_END, "<|im_start|>", "<|im_end|>", _PAD)
_NUM_BYTES = 256
_MAX_CONFIG_BYTES = 64 << 20
_VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json",
    "vocab.txt",
)  # fmt: skip
_USE_HF = "pass --tokenizer-type HuggingFaceTokenizer with --tokenizer-model FOLDER"


class MegatronTextTokenizer:
    """A Megatron tokenizer without a HF tokenizer inside, as a `TextTokenizer`.

    Chats are tokenized piece by piece. SentencePiece puts its own leading space before each piece.

    Args:
        tokenizer: what Megatron's `build_tokenizer` returned, or its library object.
    """

    def __init__(self, tokenizer: object) -> None:
        self._megatron = tokenizer
        self._library: Any = getattr(tokenizer, "_tokenizer", tokenizer)

    @property
    def eos_id(self) -> int | None:
        """Megatron's end-of-sequence id."""
        value = getattr(self._library, "eos_id", None)
        return int(value) if isinstance(value, int) and value >= 0 else None

    @property
    def chat_template(self) -> str | None:
        """The template given to Megatron (`--chat-template`, or its metadata file)."""
        return getattr(self._megatron, "chat_template", None)

    def encode(self, text: str) -> Sequence[int]:
        """Ids as Megatron's `text_to_ids` gives them."""
        return [int(i) for i in self._library.text_to_ids(text)]


def usable_tokenizer(tokenizer: object) -> PreTrainedTokenizerBase | TextTokenizer:
    """What `ChatRenderer` takes, from a HF tokenizer or any of Megatron's.

    Raises:
        ValueError: a tokenizer that cannot tokenize text, or has a chat format of its own.
    """
    if _find_hf(tokenizer) is not None:
        return hf_tokenizer(tokenizer)
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    library = getattr(tokenizer, "_tokenizer", tokenizer)
    kind = type(library).__name__
    if kind.startswith("Null"):
        raise ValueError(f"{kind} only reads numbers, it cannot tokenize text; {_USE_HF}")
    if kind.endswith("SFTTokenizer") or "Multimodal" in kind:
        raise ValueError(
            f"{kind} formats chats by a prompt format of its own, which --odb does not follow; "
            f"{_USE_HF} (the same folder), whose chat_template is used"
        )
    if not callable(getattr(library, "text_to_ids", None)):
        raise ValueError(
            f"{kind} has no text_to_ids, so it is no tokenizer of Megatron's; {_USE_HF}"
        )
    return MegatronTextTokenizer(tokenizer)


def hf_tokenizer(tokenizer: object) -> PreTrainedTokenizerBase:
    """The HF tokenizer inside Megatron's tokenizer object, or the argument if it is one.

    Megatron keeps a chat template from its metadata file outside the HF tokenizer
    (text_tokenizer.py 50-61, megatron-core 0.19.2); then a copy with that template is returned.

    Raises:
        ValueError: there is no HF tokenizer inside.
    """
    found = _find_hf(tokenizer)
    if found is None:
        library = getattr(tokenizer, "_tokenizer", tokenizer)
        raise ValueError(f"there is no HF tokenizer inside {type(library).__name__}; {_USE_HF}")
    template = None if found is tokenizer else getattr(tokenizer, "chat_template", None)
    if template is not None and template != found.chat_template:
        found = copy.copy(found)
        found.chat_template = template
    return found


def adds_special_tokens(tokenizer: object) -> bool:
    """Whether plain text gets the post-processor's tokens.

    False only with Megatron's --tokenizer-hf-no-include-special-tokens.
    """
    library = getattr(tokenizer, "_tokenizer", tokenizer)
    return bool(getattr(library, "include_special_tokens", True))


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the HF tokenizer of a folder, without network and without code from the folder.

    Raises:
        ValueError: it cannot be loaded so.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise what they like
        raise ValueError(_not_loaded(Path(folder), error)) from error
    return tokenizer


def _not_loaded(folder: Path, error: Exception) -> str:
    code = _named_code(folder)
    if code:
        return (
            f"{folder} names its own code ({code}), which is never run, and without it there is no "
            f"tokenizer: name {folder / 'tokenizer.json'} itself, if there is one (its "
            "chat_template is then ChatML), or save the tokenizer with a class of transformers"
        )
    return f"{folder} holds no tokenizer that can be loaded ({str(error)[:500]}): save it again"


def _named_code(folder: Path) -> str:
    """Return the `auto_map` of a tokenizer's configuration as text; "" for none."""
    path = folder / "tokenizer_config.json"
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
        return ""
    try:
        config = json.loads(path.read_bytes())
        return str(config["auto_map"])[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def tokenizer_folder(path: str | os.PathLike[str], cache_dir: str | os.PathLike[str]) -> Path:
    """A folder that `AutoTokenizer.from_pretrained` loads.

    Args:
        path: such a folder, or a bare `tokenizer.json` (any name that ends in `.json`).
        cache_dir: where a bare file gets its folder, named by its content. EOS and padding are the
            first of `END_NAMES` and `PAD_NAMES` that its vocabulary holds, else none.

    Raises:
        ValueError: there is no such path, or no tokenizer in it, or one that needs code of its own.
    """
    source = Path(path)
    if source.is_dir():
        if any((source / name).is_file() for name in _VOCABULARY_FILES):
            if _named_code(source):
                load_tokenizer(source)  # or say what is missing
            return source
        raise ValueError(
            f"{source} holds no tokenizer; expected one of {', '.join(_VOCABULARY_FILES)}: "
            "name the folder of the tokenizer itself"
        )
    if not source.is_file():
        raise ValueError(
            f"{source} does not exist; expected a tokenizer folder or a tokenizer.json on disk "
            "(names of a model hub are not looked up: download the tokenizer first)"
        )
    if source.suffix.lower() != ".json":
        raise ValueError(
            f"{source} is not a tokenizer.json; name its folder, or for a SentencePiece model pass "
            "--tokenizer-type SentencePieceTokenizer"
        )
    data = source.read_bytes()
    config = _guessed_config(source, data)
    digest = hashlib.sha256(data).hexdigest()
    folder = Path(cache_dir) / f"tokenizer-{digest[:16]}"

    def write(target: Path) -> None:
        (target / "tokenizer.json").write_bytes(data)
        _write_json(target / "tokenizer_config.json", config)

    return _publish(folder, digest, write)


def train_bpe(texts: Iterable[str], *, vocab_size: int, folder: str | os.PathLike[str]) -> Path:
    """Train a byte-level BPE and save it as a folder that HF and Megatron load.

    Its special tokens are <|endoftext|> (EOS), <|im_start|>, <|im_end|> and <|pad|>, ids 0 to 3;
    its chat template is ChatML with `{% generation %}` marks. The same texts give the same files.
    A folder trained on the same texts is used again.

    Args:
        texts: what to train on, held in memory.
        vocab_size: number of ids; fewer if the texts have too few pairs to merge.
        folder: the new folder. It appears whole or not at all.

    Raises:
        ValueError: the vocabulary is too small, or the folder is something else.
    """
    smallest = _NUM_BYTES + len(_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}; expected at least {smallest} "
            f"({_NUM_BYTES} bytes and {len(_SPECIAL_TOKENS)} special tokens)"
        )
    corpus = list(texts)
    fingerprint = _fingerprint(corpus, vocab_size)

    def write(target: Path) -> None:
        _trained(corpus, vocab_size).save(str(target / "tokenizer.json"))
        config = {**_config(_END, _PAD), "chat_template": CHATML_TEMPLATE}
        _write_json(target / "tokenizer_config.json", config)

    return _publish(Path(folder), fingerprint, write)


def _find_hf(tokenizer: object) -> Any:
    """The HF tokenizer: the object, or `.tokenizer` of Megatron's HF library class."""
    library = getattr(tokenizer, "_tokenizer", None)
    for candidate in (
        tokenizer,
        getattr(tokenizer, "tokenizer", None),
        getattr(library, "tokenizer", None),
    ):
        if hasattr(candidate, "special_tokens_map") and hasattr(candidate, "get_added_vocab"):
            return candidate
    return None


def _guessed_config(source: Path, data: bytes) -> dict[str, object]:
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_str(data.decode()).get_vocab()
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"{source} is not a tokenizer.json ({error}); name one written by tokenizers' save()"
        ) from error
    end = next((name for name in END_NAMES if name in vocabulary), None)
    return _config(end, next((name for name in PAD_NAMES if name in vocabulary), None))


def _config(end: str | None, pad: str | None) -> dict[str, object]:
    named = {"eos_token": end, "pad_token": pad}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: value for key, value in named.items() if value is not None},
    }


def _trained(corpus: list[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return tokenizer


def _fingerprint(corpus: list[str], vocab_size: int) -> str:
    import tokenizers

    settings = [tokenizers.__version__, vocab_size, _SPECIAL_TOKENS, CHATML_TEMPLATE]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for text in corpus:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _publish(folder: Path, fingerprint: str, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a draft beside `folder`, then rename it; keep one of this fingerprint."""
    if _is_published(folder, fingerprint):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(draft)
        (draft / "fingerprint.txt").write_text(fingerprint + "\n")
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:  # another process was first: its folder must be the same
            if not _is_published(folder, fingerprint):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _is_published(folder: Path, fingerprint: str) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    mark = folder / "fingerprint.txt"
    if mark.is_file() and mark.read_text().strip() == fingerprint:
        return True
    raise ValueError(
        f"{folder} exists and was not made from these inputs (see fingerprint.txt in it); remove "
        "it or name another folder"
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
