"""The built-in pictures: what is drawn is what the label says, the same for the same seed."""

from __future__ import annotations

import io

from PIL import Image

from rlhf_core.data.shapes import COLORS, NUMBERS, QUESTIONS, RIGHT, SHRUG, SIZE, WRONG, shape_records


def test_pictures_differ_and_depend_on_the_seed_alone():
    records = list(shape_records(200, 0))
    assert records == list(shape_records(200, 0)) != list(shape_records(200, 1))
    assert len({record["image"] for record in records}) == 200


def test_labels_of_colors_and_numbers_are_what_is_drawn():
    for record in shape_records(200, 3):
        image = Image.open(io.BytesIO(record["image"])).convert("RGB")
        inked = [(x, y) for x in range(SIZE) for y in range(SIZE) if min(image.getpixel((x, y))) < 215]
        if QUESTIONS["number"] in record["instruction"]:
            assert NUMBERS[len({(2 * x // SIZE, 2 * y // SIZE) for x, y in inked}) - 1] == record["label"]
        if QUESTIONS["color"] in record["instruction"]:
            seen = image.getpixel(inked[len(inked) // 2])
            apart = {name: sum((a - b) ** 2 for a, b in zip(ink, seen, strict=True)) for name, ink in COLORS.items()}
            assert min(apart, key=apart.get) == record["label"]


def test_demonstrator_is_right_and_shrugs_as_often_as_it_should():
    records = list(shape_records(4000, 0))
    right, shrugs = (sum(r["output"] == wanted(r) for r in records) / 4000 for wanted in (lambda r: r["label"], lambda _: SHRUG))
    assert abs(right - RIGHT) < 0.03 and abs(shrugs - (1 - RIGHT - WRONG)) < 0.03
