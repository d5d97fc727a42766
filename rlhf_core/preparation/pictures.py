"""Pictures of users' records: found, decoded once and kept in one form, before a format converts the record.

A picture is a part of a message (`{"type": "image", "image": ...}`, OpenAI's `image_url`), or stands in a column of its own, and the texts
have `<image>` in its place. It is given as a path below the source's folder of images, as bytes, base64, a data URL or the object
`{bytes, path}` of the library `datasets`. Its content tells its format, never its name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.pictures import Picture, with_pictures
from rlhf_core.data.places import locate
from rlhf_core.data.schema import Message, extras
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.values import MAX_NAME, kind

MAX_BYTES = 2**26  # of a picture's file
MAX_PIXELS = 2**25  # 8,192 x 4,096; a picture of more is taken for one that would fill the memory
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PLACE = "<image>"  # of a picture in a text
COLUMNS = ("images", "image")
_PARTS = ("image", "image_url", "input_image")
_KEYS = ("image", "image_url", "url", "path", "base64", "bytes", "data")  # of a part, any of which may hold the picture
_ORIENTATION = 0x0112  # in EXIF
_KEPT_FORMATS = ("JPEG", "PNG", "WEBP")  # whose bytes are kept if they decode to RGB as they are


class PictureStore:
    """A folder with a file for each different picture of all sources."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: dict[bytes, Picture] = {}  # hash of the content as it was given -> picture
        folder.mkdir(parents=True, exist_ok=True)

    def files(self) -> dict[str, Path]:
        """Return hash -> file of the pictures so far."""
        return {picture.sha256: self._folder / picture.sha256 for picture in self._known.values()}

    def add(self, content: bytes) -> Picture:
        """Keep a picture.

        Raises:
            Dropped: it can't be decoded, or is too large.
        """
        key = hashlib.sha256(content).digest()
        if key not in self._known:
            kept, width, height = decoded(content)
            sha256 = hashlib.sha256(kept).hexdigest()
            (self._folder / sha256).write_bytes(kept)
            self._known[key] = Picture(sha256, width, height)
        return self._known[key]

    def add_file(self, path: Path) -> Picture:
        """Keep the picture in a file.

        Raises:
            Dropped: as `add`; or the file is missing, or no plain one, such as a pipe, which would be read for ever.
        """
        if not path.is_file():
            raise Dropped("a picture's file is missing")
        if path.stat().st_size > MAX_BYTES:
            raise Dropped(f"a picture has more than {MAX_BYTES} bytes")
        return self.add(path.read_bytes())


def decoded(content: bytes) -> tuple[bytes, int, int]:
    """Return the bytes that are kept of a picture, and its width and height.

    They are the given bytes if these decode to RGB upright as they are, and otherwise a PNG of the first frame, upright, on white.

    Raises:
        Dropped: it can't be decoded, or is too large.
    """
    if len(content) > MAX_BYTES:
        raise Dropped(f"a picture has more than {MAX_BYTES} bytes")
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # of damaged metadata
            too_large = image.width * image.height > MAX_PIXELS
            if not too_large:
                image.load()
                return _kept(content, image)
    except Image.DecompressionBombError:
        pass
    except Exception as error:  # decoders raise anything on damaged files
        raise Dropped("a picture can't be decoded") from error
    raise Dropped(f"a picture has more than {MAX_PIXELS} pixels")


def _kept(content: bytes, image: Image.Image) -> tuple[bytes, int, int]:
    upright = image.getexif().get(_ORIENTATION, 1) == 1
    if image.mode == "RGB" and upright and image.format in _KEPT_FORMATS and "transparency" not in image.info:
        return (content, *image.size) if getattr(image, "n_frames", 1) == 1 else _png(image)
    return _png(in_rgb(ImageOps.exif_transpose(image)))


def _png(image: Image.Image) -> tuple[bytes, int, int]:
    buffer = io.BytesIO()
    Image.frombytes("RGB", image.size, image.tobytes()).save(buffer, "PNG")  # without metadata
    return (buffer.getvalue(), *image.size)


def in_rgb(image: Image.Image) -> Image.Image:
    """Return a picture in RGB: on white where it is transparent, and with 16 bits of grey scaled to 8."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layered).convert("RGB")
    return image.convert("RGB")


class SourcePictures:
    """Reads the pictures of a source's records."""

    def __init__(self, source: SourceConfig, store: PictureStore):
        self._store, self._column = store, source.columns.get("images")
        self._named = source.images is not None
        self._folder = None if source.images is None else locate(source.images).resolve()

    def read(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Picture]]:
        """Return the record with `Picture`s in its messages, without its column of pictures, and the pictures that have no place yet.

        Raises:
            Dropped, Misfit: a picture is missing, remote or damaged, or their number differs from that of their places.
        """
        column = self._column if self._column is not None else next((name for name in COLUMNS if values.get(name)), None)
        given = values.get(column) if column is not None else None
        own = [self._picture(item) for item in (given if isinstance(given, list) else [given]) if item is not None]
        found, placed = {}, False
        for name, value in values.items():
            if name != column:
                left = list(own)
                found[name] = self._with_pictures(value, left)
                if 0 < len(left) < len(own):
                    raise Dropped("a record has more pictures than places for them")
                placed |= len(left) < len(own)
        return found, [] if placed else own

    def _with_pictures(self, value: Any, left: list[Picture]) -> Any:
        """Return a value with a `Picture` in each part that is one; a part without content takes the next one that is left."""
        if isinstance(value, list):
            return [self._with_pictures(item, left) for item in value]
        if not isinstance(value, Mapping):
            return value
        if value.get("type") not in _PARTS:
            return {key: self._with_pictures(inner, left) for key, inner in value.items()}
        content = next((value[key] for key in _KEYS if value.get(key) is not None), None)
        if isinstance(content, Mapping) and content.get("url") is not None:
            content = content["url"]
        if content is None and not left:
            raise Dropped("a record has fewer pictures than places for them")
        return {"type": "image", "picture": left.pop(0) if content is None else self._picture(content)}

    def _picture(self, value: Any) -> Picture:
        if isinstance(value, Mapping):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes | bytearray):
            return self._store.add(bytes(value))
        if not isinstance(value, str):
            message = f"a picture: expected a path, bytes, base64 or an object with one of them, got {kind(value)}; convert it first"
            raise Misfit(message, "a picture is neither path nor bytes")
        return self._of_text(value)

    def _of_text(self, text: str) -> Picture:
        if text.startswith("data:"):
            return self._store.add(of_base64(text.partition(",")[2]))
        if "://" in text[:20]:
            message = (
                f"a picture: expected a file or bytes, got the remote address {shown(repr(text), 120)}, whose content may change; "
                "download the pictures into a folder, name that as the source's images, and write their paths in it"
            )
            raise Misfit(message, "a picture is a remote address")
        if len(text) > MAX_NAME:
            return self._store.add(of_base64(text))
        return self._of_file(text)

    def _of_file(self, name: str) -> Picture:
        if self._folder is None:
            message = (
                f"a picture: expected the source's key images beside the path {shown(repr(name), 120)}, got none; set it to the folder in "
                "which the records' paths are"
            )
            raise Misfit(message, "a picture is a path without a folder")
        try:
            path = (self._folder / name).resolve()
            if not path.is_relative_to(self._folder):
                raise Dropped("a picture's path leaves the source's folder of images")
            return self._store.add_file(path)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise Dropped("a picture's file is missing") from error


def of_base64(text: str) -> bytes:
    """Return the bytes of a picture in base64. Raises Dropped if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Dropped("a picture is no base64") from error


def place(messages: list[Message], pictures: Sequence[Picture]) -> list[Message]:
    """Return a conversation with a record's pictures in the places `<image>`, or before the first message of the user if it has none.

    A line break between a place and the text beside it is left out, since templates write one where they want one.

    Raises:
        Dropped: places and pictures differ in number.
    """
    places = sum(message["content"].count(PLACE) for message in messages)
    if not places and pictures:
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        asked = messages[first]
        return [*messages[:first], _in_parts(asked, [*pictures, asked["content"]]), *messages[first + 1 :]]
    if places != len(pictures):
        raise Dropped(f"a record has {'more' if places > len(pictures) else 'fewer'} places than pictures")
    left, found = list(pictures), []
    for message in messages:
        texts = message["content"].split(PLACE)
        parts: list[str | Picture] = [texts[0].removesuffix("\n") if len(texts) > 1 else texts[0]]
        for number, text in enumerate(texts[1:], start=1):
            text = text.removeprefix("\n")
            parts += [left.pop(0), text.removesuffix("\n") if number < len(texts) - 1 else text]
        found.append(message if len(texts) == 1 else _in_parts(message, parts))
    return found


def _in_parts(message: Message, parts: Sequence[str | Picture]) -> Message:
    if "content" in extras(message):
        raise Dropped("a message has both parts and places of pictures")
    return with_pictures(message, [part for part in parts if part])
