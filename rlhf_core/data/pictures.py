"""Pictures of prepared conversations: `data/prepared/pictures.arrow` has each of them once, and messages name them by their hash.

A message with pictures has its content in parts in the field `extra` (`rlhf_core.data.schema`); a part of type picture has the keys of
`Picture`. The message's text has a stand-in in the picture's place, so that conversations about different pictures are different texts.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from rlhf_core.data.schema import Message, extras

if TYPE_CHECKING:
    from PIL.Image import Image

FILE = "pictures.arrow"
SCHEMA = pa.schema([("sha256", pa.string()), ("bytes", pa.binary())])
PICTURE = "picture"  # type of a part
SHOWN, PREVIEW = 4, 128  # pictures of a conversation in a report, and pixels of a side
SHOWN_DIGITS = 16  # of a hash, in a message's text
_AT_ONCE = 64  # pictures of a record batch


class Picture(NamedTuple):
    """A picture of `pictures.arrow`. sha256: of its bytes there. width, height: in pixels."""

    sha256: str
    width: int
    height: int

    @property
    def stand_in(self) -> str:
        """The text in the picture's place in a message's content."""
        return f"<picture {self.sha256[:SHOWN_DIGITS]}>"

    @property
    def part(self) -> dict[str, Any]:
        """The part of a message's content in `extra`."""
        return {"type": PICTURE, "text": self.stand_in, **self._asdict()}


def pictures_of(messages: Iterable[Message]) -> tuple[Picture, ...]:
    """Return the pictures of a conversation, in order."""
    wide = (message for message in messages if PICTURE in (message.get("extra") or ""))
    parts = (part for message in wide for part in extras(message).get("content", ()))
    return tuple(Picture(part["sha256"], part["width"], part["height"]) for part in parts if part["type"] == PICTURE)


class StoredPictures:
    """The pictures of a folder with prepared data. The file is mapped into memory, and a picture is decoded each time it is read.

    Raises:
        ValueError: the file is damaged.
    """

    def __init__(self, folder: Path):
        self._path, self._places = folder / FILE, {}
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(self._path)))
            batches = (self._reader.get_batch(i) for i in range(self._reader.num_record_batches))
            self._places = {sha: (i, row) for i, batch in enumerate(batches) for row, sha in enumerate(batch["sha256"].to_pylist())}
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self._path}: expected the prepared pictures, got: {error}; run prepare_data again") from error

    def read(self, picture: Picture) -> Image:
        """Return a picture in RGB.

        Raises:
            ValueError: the file has no such picture, or another one under its hash.
        """
        from PIL import Image

        place = self._places.get(picture.sha256)
        content = None if place is None else self._reader.get_batch(place[0])["bytes"][place[1]].as_py()
        if content is None or hashlib.sha256(content).hexdigest() != picture.sha256:
            got = "none" if content is None else "another one"
            raise ValueError(f"{self._path}: expected the picture {picture.sha256[:SHOWN_DIGITS]}, got {got}; run prepare_data again")
        return Image.open(io.BytesIO(content)).convert("RGB")


class PictureFiles:
    """Pictures of a folder that has each in a file, whose name is its hash."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, picture: Picture) -> Image:
        """Return a picture in RGB.

        Raises:
            ValueError: there is no such picture.
        """
        from PIL import Image

        if not (path := self._folder / picture.sha256).is_file():
            raise ValueError(f"{self._folder}: expected the picture {picture.sha256[:SHOWN_DIGITS]}, got none; run prepare_data again")
        return Image.open(path).convert("RGB")


def previews(folder: Path) -> Callable[[Iterable[Message]], list[str]] | None:
    """Return what makes data URLs of small copies of a conversation's first pictures; None for prepared data without pictures."""
    if not (folder / FILE).exists():
        return None
    stored = StoredPictures(folder)
    of_one = lru_cache(SHOWN * 64)(lambda picture: _preview(stored.read(picture)))
    return lambda messages: [of_one(picture) for picture in pictures_of(messages)[:SHOWN]]


def _preview(image: Image) -> str:
    """Return a data URL of a few kB."""
    buffer = io.BytesIO()
    image.thumbnail((PREVIEW, PREVIEW))
    image.save(buffer, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_pictures(folder: Path, wanted: Iterable[str], contents: Mapping[str, Path]) -> int:
    """Write the wanted pictures in the order of their hashes, and return their number; without any there is no file.

    Args:
        contents: hash -> a file with the picture's bytes.
    """
    hashes = sorted(set(wanted))
    if hashes:
        with _writer(folder / FILE) as file:
            for first in range(0, len(hashes), _AT_ONCE):
                part = hashes[first : first + _AT_ONCE]
                file.write_batch(pa.record_batch([part, [contents[sha].read_bytes() for sha in part]], schema=SCHEMA))
    return len(hashes)


@contextmanager
def _writer(path: Path) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as file:
        yield file


def with_pictures(message: Message, parts: Sequence[str | Picture]) -> Message:
    """Return the message with content in parts: texts and pictures."""
    written = [part.part if isinstance(part, Picture) else {"type": "text", "text": part} for part in parts]
    text = "\n".join(part.stand_in if isinstance(part, Picture) else part for part in parts)
    return {**message, "content": text, "extra": json.dumps({**extras(message), "content": written}, ensure_ascii=False)}
