"""Chat files whose messages have pictures: each becomes as many tokens as it has visual ones.

Must not know a vision tower. The length of a sample is known here for the first time: after the
picture was opened and its size rounded to patches.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.chat_record import parse_record
from odb_megatron.data.image_parts import lift_images
from odb_megatron.data.images import SampleImages
from odb_megatron.data.patches import IMAGE_TEXT, IMAGE_TOKEN, PatchRules, cut_into_patches
from odb_megatron.data.picture import check_pillow, open_picture, shown_name
from odb_megatron.data.preprocess import SampleRules, shift_labels
from odb_megatron.data.sample import Sample
from odb_megatron.data.sources import ChatSource

__all__ = ["ImageChatSource", "ImageRules", "expand_images"]

Integers = npt.NDArray[np.int64]
_Learn = TypeVar("_Learn", np.bool_, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """What becomes of the pictures of a chat file.

    Attributes:
        patches: sizes.
        folder: where pictures lie; empty for the folder of the chat file.
        text: what stands for a picture in a message's text; holds `token` once.
        token: becomes a picture's visual tokens.
    """

    patches: PatchRules = field(default_factory=PatchRules)
    folder: str = ""
    text: str = IMAGE_TEXT
    token: str = IMAGE_TOKEN

    def __post_init__(self) -> None:
        if self.text.count(self.token) != 1:
            raise ValueError(
                f"a picture's text {self.text!r} must hold its token {self.token!r} once"
            )


class ImageChatSource(ChatSource):
    """Conversations with pictures; see `image_parts` for their layout.

    Args:
        path: the file.
        rules: policies for every record.
        renderer: tokenizer and chat template.
        images: what becomes of pictures.

    Raises:
        ValueError: the tokenizer has no token for visual ones, or Pillow is missing.
    """

    def __init__(
        self,
        path: str,
        *,
        rules: SampleRules,
        renderer: ChatRenderer,
        images: ImageRules,
        cache: str | None = None,
    ) -> None:
        super().__init__(path, rules=rules, renderer=renderer, cache=cache)
        check_pillow()
        self._images = images
        self._folder = images.folder or self._records.folder
        self._token = renderer.token_id(images.token)

    def fingerprint(self) -> str:
        """The rules count, the pictures' own content does not."""
        own = f"{super().fingerprint()} {self._images.patches} {self._images.text}"
        return hashlib.sha256(own.encode()).hexdigest()

    def _load(self, index: int, *, source: int) -> Sample:
        record, names = lift_images(self._records[index], self._images.text)
        ids, weights = self._renderer.render(parse_record(record))
        rules = self._images.patches
        num_found = int((ids == self._token).sum())
        if num_found != len(names):
            raise ValueError(
                f"the record has {len(names)} pictures, and its text {num_found} times "
                f"{self._images.token}: a message must not hold this token itself, and the chat "
                "template must print each message once"
            )
        if not names:
            return shift_labels(ids, weights, source=source)
        cut = [self._cut(name) for name in names]
        grid = np.array([one for _, one in cut], dtype=np.int64)
        ids, weights, starts = expand_images(
            ids, weights, token=self._token, counts=grid.prod(axis=1) // rules.merge**2
        )
        sample = shift_labels(ids, weights, source=source)
        images = SampleImages(
            pixel_values=np.concatenate([patches for patches, _ in cut]),
            grid_thw=grid,
            starts=starts,
            merge=rules.merge,
        )
        return Sample(
            tokens=sample.tokens,
            labels=sample.labels,
            loss_mask=sample.loss_mask,
            source=source,
            num_patches=images.num_patches,
            images=images,
        )

    def _cut(self, name: str) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
        picture = open_picture(name, folder=self._folder)
        try:
            return cut_into_patches(picture, self._images.patches)
        except ValueError as error:
            raise ValueError(f"{shown_name(name)}: {error}") from error


def expand_images(
    ids: Integers, weights: npt.NDArray[np.float32], *, token: int, counts: Integers
) -> tuple[Integers, npt.NDArray[np.float32], Integers]:
    """Repeat each token that stands for a picture as often as it has visual tokens.

    Args:
        ids: int64 [L], `token` once for each picture.
        weights: float32 [L], of each token in the loss; that of visual ones becomes 0.
        token: id that stands for a picture.
        counts: int64 [I], visual tokens of each picture.

    Returns:
        ids and weights, longer; and where each picture begins, int64 [I].
    """
    times = np.ones(ids.size, dtype=np.int64)
    places = np.flatnonzero(ids == token)
    times[places] = counts
    starts = (np.cumsum(times) - times)[places]
    return np.repeat(ids, times), np.repeat(weights * (ids != token), times), starts
