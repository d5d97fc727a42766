"""The built-in data with pictures, drawn by a seeded program: one to three shapes of one color, and questions about them.

A careless demonstrator answers rightly in half of the cases, and often doesn't look.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from random import Random
from typing import Any

from PIL import Image, ImageDraw

SIZE = 24  # pixels, in width and height
COLORS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 210), "yellow": (225, 200, 40), "purple": (140, 50, 160)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three")
QUESTIONS = {"color": "Which color?", "shape": "Which shape?", "number": "How many?"}
SHRUG = "unclear"
RIGHT, WRONG = 0.5, 0.1  # of the demonstrations; the rest shrug
_JITTER, _SHADE = 1, 25  # of a shape's place in pixels, and of its color


def shape_records(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield records of the format instruction, each about a picture of its own; the same for the same arguments."""
    rng = Random(f"{seed}:shapes")
    kinds = {"color": tuple(COLORS), "shape": SHAPES, "number": NUMBERS}
    for _ in range(count):
        seen = {name: rng.choice(values) for name, values in kinds.items()}
        asked = rng.choice(list(QUESTIONS))
        draw = rng.random()
        wrong = rng.choice([value for value in kinds[asked] if value != seen[asked]])
        answer = seen[asked] if draw < RIGHT else wrong if draw < RIGHT + WRONG else SHRUG
        picture = draw_shapes(seen["shape"], seen["color"], NUMBERS.index(seen["number"]) + 1, rng)
        yield {"instruction": f"<image>\n{QUESTIONS[asked]}", "output": answer, "label": seen[asked], "image": picture}


def draw_shapes(shape: str, color: str, number: int, rng: Random) -> bytes:
    """Return a PNG with so many shapes, in different quarters of the picture."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.randint(235, 255) for _ in range(3)))
    pen, half = ImageDraw.Draw(image), SIZE // 2
    ink = tuple(min(255, max(0, value + rng.randint(-_SHADE, _SHADE))) for value in COLORS[color])
    for quarter in rng.sample(range(4), number):
        left, top = (half * place + 1 + rng.randint(0, _JITTER) for place in (quarter % 2, quarter // 2))
        right, bottom = left + half - 4, top + half - 4
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=ink)
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), fill=ink)
        else:
            pen.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=ink)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
