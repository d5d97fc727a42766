"""Pictures of users' records on their way to data/prepared."""

from __future__ import annotations

import base64
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from seeing_models import save_seeing_model
from tiny_models import tiny_params

from rlhf_core.config import SourceConfig
from rlhf_core.data.pictures import FILE, StoredPictures, pictures_of
from rlhf_core.data.schema import extras, open_tables, read_rows
from rlhf_core.models.tokenizer import pretrained_tokenizer
from rlhf_core.preparation import pictures as limits
from rlhf_core.preparation.drops import DropCounts, Dropped
from rlhf_core.preparation.pictures import PictureStore, decoded
from rlhf_core.preparation.prepare import prepare
from rlhf_core.preparation.sources import read_source
from rlhf_core.preparation.validation.tables import read_measured
from rlhf_core.preparation.validation.validate import validate

RED = (200, 30, 40)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def red(width: int = 6, height: int = 4) -> Image.Image:
    return Image.new("RGB", (width, height), RED)


def noise() -> Image.Image:
    return Image.effect_noise((40, 30), 90).convert("RGB")


def source(path: Path, **options: Any) -> SourceConfig:
    base = {"name": "seen", "kind": "file", "uses": ["sft", "prompt"], "path": str(path), "format": "messages"}
    return SourceConfig(**{**base, **options})


def read(tmp_path: Path, records: list[dict], **options: Any) -> tuple[list[dict], DropCounts, dict[str, Path]]:
    """The demonstrations of records, what was dropped, and the files of their pictures."""
    path = tmp_path / "records.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return read_from(source(path, **options), tmp_path)


def read_from(of: SourceConfig, tmp_path: Path) -> tuple[list[dict], DropCounts, dict[str, Path]]:
    store, dropped = PictureStore(tmp_path / "store"), DropCounts()
    rows = [row for use, row in read_source(of, seed=0, dropped=dropped, pictures=store) if use == "sft"]
    return rows, dropped, store.files()


def talk(*content: Any) -> list[dict]:
    return [{"role": "user", "content": content[0] if len(content) == 1 else list(content)}, {"role": "assistant", "content": "Red."}]


# Decoding


def opened(content: bytes) -> Image.Image:
    kept, width, height = decoded(content)
    image = Image.open(io.BytesIO(kept))
    assert image.mode == "RGB" and image.size == (width, height)
    return image


@pytest.mark.parametrize(("mode", "form", "color", "wanted"), [
    ("L", "PNG", 77, (77, 77, 77)),
    ("1", "PNG", 1, (255, 255, 255)),
    ("I;16", "PNG", 0x8000, (128, 128, 128)),
    ("P", "GIF", 0, (0, 0, 0)),
    ("LA", "PNG", (100, 0), (255, 255, 255)),
    ("RGBA", "PNG", (*RED, 255), RED),
    ("RGBA", "PNG", (0, 0, 0, 0), (255, 255, 255)),
    ("CMYK", "TIFF", (0, 255, 255, 0), (255, 0, 0)),
    ("RGB", "BMP", RED, RED),
    ("RGB", "WEBP", RED, RED),
])  # fmt: skip
def test_any_mode_becomes_rgb_on_white(mode, form, color, wanted):
    options = {"lossless": True} if form == "WEBP" else {}
    assert opened(encoded(Image.new(mode, (3, 2), color), form, **options)).getpixel((1, 1)) == wanted


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (4000, 3000)])
def test_sizes_from_one_pixel_to_twelve_million(size):
    assert opened(encoded(Image.new("RGB", size, RED))).size == size


def test_plain_rgb_keeps_its_bytes():
    for form in ("PNG", "JPEG"):
        assert decoded(encoded(red(), form))[0] == encoded(red(), form)


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (6, 4), "white")
    image.paste(RED, (0, 0, 1, 4))  # the left column
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored picture is to be turned clockwise
    turned = opened(encoded(image, "PNG", exif=exif))
    assert turned.size == (4, 6) and turned.getpixel((2, 0)) == RED and turned.getpixel((2, 5)) == (255, 255, 255)
    assert not turned.getexif()


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (5, 5), color) for color in (RED, (0, 0, 255))]
    for form, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        animated = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
        assert opened(animated).getpixel((2, 2)) == RED and getattr(opened(animated), "n_frames", 1) == 1


def bomb() -> bytes:
    """A PNG of 14,000 x 14,000 white pixels, 200 MB of zeros unpacked, in 200 kB."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)

    head = (14_000).to_bytes(4) * 2 + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(14_001 * 14_000), 1)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("content", "reason"), [
    (encoded(noise())[:-60], "can't be decoded"),
    (encoded(red(64, 64), "JPEG")[:400], "can't be decoded"),
    (b"", "can't be decoded"),
    (b"%!PS-Adobe-3.0 EPSF-3.0", "can't be decoded"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "can't be decoded"),
])  # fmt: skip
def test_damaged_pictures_are_dropped(content, reason):
    with pytest.raises(Dropped, match=reason):
        decoded(content)


def test_bombs_are_refused_by_their_size_before_they_are_unpacked(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("unpacked"))
    with pytest.raises(Dropped, match="more than 33554432 pixels"):
        decoded(bomb())
    with pytest.raises(Dropped, match="more than 67108864 bytes"):
        decoded(bytes(limits.MAX_BYTES + 1))


# Shapes


def given_as(shape: str, folder: Path) -> dict[str, Any]:
    (folder / "red.png").write_bytes(encoded(red()))
    text, content = {"type": "text", "text": "Which color?"}, base64.b64encode(encoded(red(40, 40))).decode()
    url = f"data:image/png;base64,{content}"
    return {
        "path": {"messages": talk({"type": "image", "image": "red.png"}, text)},
        "base64": {"messages": talk({"type": "image", "image": base64.b64encode(encoded(noise())).decode()}, text)},
        "data url": {"messages": talk({"type": "image", "image": url}, text)},
        "openai": {"messages": talk({"type": "image_url", "image_url": {"url": url}}, text)},
        "keys": {"messages": talk({"type": "image", "path": "red.png"}, text)},
        "nulls of a table": {"messages": talk({"type": "image", "image": "red.png", "text": None}, {**text, "image": None})},
        "column and places": {"messages": talk("<image>\nWhich color?"), "images": ["red.png"]},
        "column alone": {"messages": talk("Which color?"), "images": ["red.png"]},
        "column and parts": {"messages": talk({"type": "image"}, text), "images": ["red.png"]},
        "single column": {"messages": talk("<image>Which color?"), "image": "red.png"},
    }[shape]


SHAPES = (
    *("path", "base64", "data url", "openai", "keys", "nulls of a table"),
    *("column and places", "column alone", "column and parts", "single column"),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_becomes_a_picture_before_the_text(shape, tmp_path):
    rows, dropped, files = read(tmp_path, [given_as(shape, tmp_path)], images=str(tmp_path))
    (message,) = rows[0]["messages"]
    (seen,) = pictures_of([message])
    assert not dropped and list(files) == [seen.sha256]
    assert [part["type"] for part in extras(message)["content"]] == ["picture", "text"]
    assert message["content"] == f"{seen.stand_in}\nWhich color?"
    assert Image.open(files[seen.sha256]).size == (seen.width, seen.height)


def test_places_take_pictures_in_order(tmp_path):
    for name, width in (("a.png", 6), ("b.png", 7)):
        (tmp_path / name).write_bytes(encoded(red(width)))
    record = {"messages": talk("Left <image> and right\n<image>\n?"), "images": ["b.png", "a.png"]}
    rows, _, _ = read(tmp_path, [record], images=str(tmp_path))
    parts = extras(rows[0]["messages"][0])["content"]
    assert [part.get("width", part["text"]) for part in parts] == ["Left ", 7, " and right", 6, "?"]


def test_parquet_with_bytes_and_a_mapped_column(tmp_path):
    records = [{"messages": talk("<image>Which?"), "shots": [{"bytes": encoded(red(9)), "path": "x.png"}]}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "records.parquet")
    rows, dropped, _ = read_from(source(tmp_path / "records.parquet", columns={"images": "shots"}), tmp_path)
    assert pictures_of(rows[0]["messages"])[0].width == 9 and not dropped


def test_data_sets_of_the_library_aren_t_decoded_by_it(tmp_path):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Feature

    features = Features({"messages": [{"role": Value("string"), "content": Value("string")}], "images": List(Feature())})
    records = [{"messages": talk("<image>Which?"), "images": [{"bytes": encoded(red(8)), "path": None}]}]
    Dataset.from_list(records, features=features).save_to_disk(tmp_path / "saved")
    rows, dropped, _ = read_from(source(tmp_path / "saved", kind="huggingface"), tmp_path)
    assert pictures_of(rows[0]["messages"])[0].width == 8 and not dropped


def test_pairs_share_their_prompt_s_pictures(tmp_path):
    (tmp_path / "red.png").write_bytes(encoded(red()))
    parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    pair = {"chosen": talk(*parts), "rejected": [talk(*parts)[0], {"role": "assistant", "content": "Blue."}], "images": ["red.png"]}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(pair) + "\n", encoding="utf-8")
    wanted = source(path, format="preference", uses=["preference"], images=str(tmp_path))
    rows = [row for _, row in read_source(wanted, seed=0, dropped=DropCounts(), pictures=PictureStore(tmp_path / "store"))]
    assert len(pictures_of(rows[0]["messages"])) == 1 and (rows[0]["chosen"], rows[0]["rejected"]) == ("Red.", "Blue.")


# Records that are dropped, and sources that are refused


@pytest.mark.parametrize(("record", "reason"), [
    ({"messages": talk("<image>?"), "images": ["gone.png"]}, "a picture's file is missing"),
    ({"messages": talk("<image>?"), "images": ["re\0d.png"]}, "a picture's file is missing"),
    ({"messages": talk("<image>?"), "images": ["circle.png"]}, "a picture's file is missing"),
    ({"messages": talk("<image>?"), "images": ["pipe.png"]}, "a picture's file is missing"),
    ({"messages": talk("<image>?"), "images": ["."]}, "a picture's file is missing"),
    ({"messages": talk("<image>?"), "images": ["../secret.png"]}, "a picture's path leaves the source's folder of images"),
    ({"messages": talk("<image>?"), "images": ["/etc/passwd"]}, "a picture's path leaves the source's folder of images"),
    ({"messages": talk("<image>?"), "images": ["link.png"]}, "a picture's path leaves the source's folder of images"),
    ({"messages": talk("<image>?"), "images": ["broken.png"]}, "a picture can't be decoded"),
    ({"messages": talk("<image>?"), "images": ["data:image/png;base64,%%%"]}, "a picture is no base64"),
    ({"messages": talk("<image><image>?"), "images": ["red.png"]}, "a record has more places than pictures"),
    ({"messages": talk("<image>?"), "images": ["red.png", "red.png"]}, "a record has fewer places than pictures"),
    ({"messages": talk("<image>?")}, "a record has more places than pictures"),
    ({"messages": talk({"type": "image"}, {"type": "text", "text": "?"})}, "a record has fewer pictures than places for them"),
    ({"messages": talk("?"), "images": ["http://example.com/a.png"]}, "a picture is a remote address"),
    ({"messages": talk("?"), "images": [7]}, "a picture is neither path nor bytes"),
    ({"messages": talk("?"), "video": "a.mp4"}, "column video has pictures, video or sound"),
])  # fmt: skip
def test_a_record_with_a_bad_picture_is_dropped_and_counted(record, reason, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "red.png").write_bytes(encoded(red()))
    (images / "broken.png").write_bytes(encoded(red())[:30])
    (tmp_path / "secret.png").write_bytes(encoded(red()))
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    (images / "circle.png").symlink_to(images / "circle.png")
    os.mkfifo(images / "pipe.png")
    good = {"messages": talk("<image>Which?"), "images": ["red.png"]}
    rows, dropped, _ = read(tmp_path, [good, record], images=str(images))
    assert len(rows) == 1 and dropped == {reason: 1}


def test_a_source_of_remote_pictures_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"remote address 'https://.*download the pictures into a folder"):
        read(tmp_path, [{"messages": talk("?"), "images": ["https://example.com/a.png"]}])


def test_paths_without_a_folder_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"expected the source's key images beside the path 'a\.png'"):
        read(tmp_path, [{"messages": talk("?"), "images": ["a.png"]}])


def test_a_model_that_doesn_t_see_gets_no_picture(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"messages": talk("?"), "images": ["a.png"]}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"for pictures set model\.vision"):
        list(read_source(source(path), seed=0, dropped=DropCounts()))


# The whole stage


def prepared(tmp_path: Path, name: str, model: Path) -> Path:
    params = tiny_params(
        model__path=str(model), model__architecture=None, model__vision="frozen", model__max_length=128, data__max_rows=20,
        data__sources=[source(tmp_path / "records.jsonl", images=str(tmp_path / "images")).model_dump()], alignment__method="dpo",
        reward__enabled=False, rl__reward__scorers=[], rl__evaluation__sources=[],
    )  # fmt: skip
    made = prepare(
        params.data, params.model, tmp_path / name, tmp_path / f"{name}-measured", scratch=tmp_path / f"{name}-scratch", seed=0,
        tokenizer=pretrained_tokenizer(params.model), writer=None, max_dropped_fraction=0.5,
    )  # fmt: skip
    used = {p for use in ("sft", "prompt") for row in read_rows(tmp_path / name, use) for p in pictures_of(row["messages"])}
    assert made.metrics()["pictures"] == len(used) and 20 <= len(used) < 30
    return tmp_path / name


def test_prepared_folder_has_the_pictures_of_its_rows_alone_and_the_same_bytes_again(tmp_path):
    (tmp_path / "images").mkdir()
    records = []
    for number in range(30):
        (tmp_path / "images" / f"{number}.png").write_bytes(encoded(red(8 + number, 8)))
        records.append({"messages": talk(f"<image>Which color has picture {number}?"), "images": [f"{number}.png"]})
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records), encoding="utf-8")
    model = save_seeing_model(tmp_path / "model")
    first, second = (prepared(tmp_path, name, model) for name in ("first", "second"))
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in (FILE, "sft.parquet", "prompt.parquet"))
    used = {p for use in ("sft", "prompt") for row in read_rows(first, use) for p in pictures_of(row["messages"])}
    stored = StoredPictures(first)
    assert {stored.read(p).size for p in used} == {(p.width, p.height) for p in used}

    tables, params = open_tables(first), tiny_params()
    findings = validate(
        tables, lambda use: read_measured(tmp_path / "first-measured", use, tables[use]), params.validation, max_length=128,
        needed=(), pairs=False, external=(), docs=tmp_path / "docs",
    )  # fmt: skip
    counted = [finding for finding in findings if finding.name == "picture_tokens"]
    assert {f.use for f in counted} == {"sft", "prompt"} and all(f.passed and f.checked == 20 for f in counted)


def test_a_tokenizer_that_splits_the_image_token_fails_the_expectation(tmp_path):
    from seeing_models import rows, seeing, store

    from rlhf_core.data.schema import write_rows
    from rlhf_core.preparation.validation.measures import measure_table

    tokenizer, _ = seeing(save_seeing_model(tmp_path / "model"), tmp_path / "data")
    texts = ("chosen", "rejected")
    common = {"source": "a", "split": "train", "origin": None}
    of_use = [common | {k: v for k, v in row.items() if k not in texts} for row in rows(store(tmp_path / "data", 3))]
    write_rows(tmp_path / "rows", "sft", of_use)
    table = open_tables(tmp_path / "rows")
    tokenizer.vision.filler_id = -1  # as if the token that the processor expects weren't one of the tokenizer's
    tokenizer.vision.expand = lambda text, pictures: text
    tokenizer.vision.num_tokens = lambda pictures: len(pictures)
    findings = validate(
        table, lambda use: measure_table(use, table[use], tokenizer), tiny_params().validation, max_length=256, needed=(), pairs=False,
        external=(), docs=tmp_path / "docs",
    )  # fmt: skip
    (found,) = [finding for finding in findings if finding.name == "picture_tokens"]
    assert not found.passed and found.unexpected == 2
