"""The colours of curves are told apart with colour blindness, and seen on the page, in both schemes."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.report import colors
from rlhf_core.report.colors import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, TEAL

CURVES = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL)
# Machado, Oliveira and Fernandes 2009, https://doi.org/10.1109/TVCG.2009.113, severity 1, for linear RGB.
SEEN = {
    "all colours": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])
PALETTES = {"light": (CURVES, "#ffffff"), "dark": (tuple(DARK[color] for color in CURVES), "#1b1f26")}


def linear(color: str) -> np.ndarray:
    encoded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, in which a distance of about 2 is just seen."""
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's ratio."""
    light, dark = sorted((float(TO_XYZ[1] @ linear(color)) for color in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_measures_are_right():
    assert contrast("#000000", "#ffffff") == pytest.approx(21, abs=0.01)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.05)  # published values of sRGB's red


@pytest.mark.parametrize("scheme", PALETTES)
@pytest.mark.parametrize("eye", SEEN)
def test_any_two_curves_differ_clearly_to_every_eye(scheme: str, eye: str):
    palette, _ = PALETTES[scheme]
    distances = {
        (one, other): np.linalg.norm(lab(SEEN[eye] @ linear(one)) - lab(SEEN[eye] @ linear(other)))
        for one, other in combinations(palette, 2)
    }
    assert min(distances.values()) > 20, min(distances.items(), key=lambda item: item[1])


@pytest.mark.parametrize("scheme", PALETTES)
def test_curves_are_seen_on_the_page(scheme: str):
    palette, ground = PALETTES[scheme]
    assert min(contrast(color, ground) for color in palette) >= 3.0


@pytest.mark.parametrize("scheme", [0, 1, 2])
def test_texts_of_the_page_are_read(scheme: str):
    """Normal text needs 4.5:1 on the page and on its cards: light, dark and print."""
    style = (Path(colors.__file__).parent / "report.css").read_text()
    blocks = [block for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    values = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})[;\s]", blocks[scheme]))
    full = {name: color if len(color) == 7 else "#" + "".join(c * 2 for c in color[1:]) for name, color in values.items()}
    for ground in ("ground", "card"):
        for name in ("ink", "muted", "good", "bad", "open"):
            assert contrast(full[name], full[ground]) >= 4.5, (name, ground)
