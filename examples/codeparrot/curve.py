"""The loss of a run as a picture, from its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 400, 50


def write_curve(metrics: Path, picture: Path, entropy: float) -> None:
    """Write an SVG with the loss of each step, that of each evaluation, and the unigram entropy, in nats per token."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    training = [(row["iteration"], row["loss"]) for row in rows if "loss" in row]
    name = "eval/validation/loss"
    validation = [(row["iteration"], row[name]) for row in rows if name in row]
    last = max(step for step, _ in [*training, *validation])
    highest = 1.05 * max(value for _, value in [*training, *validation, (0, entropy)])

    def points(curve: list[tuple[int, float]]) -> str:
        scale = (WIDTH - 2 * MARGIN) / max(1, last), (HEIGHT - 2 * MARGIN) / highest
        return " ".join(
            f"{MARGIN + step * scale[0]:.1f},{HEIGHT - MARGIN - value * scale[1]:.1f}" for step, value in curve
        )

    lines = [
        (points([(0, entropy), (last, entropy)]), "#999", "4 4", f"unigram entropy {entropy:.2f}"),
        (points(training), "#7aa6d8", "none", f"training {training[-1][1]:.2f}"),
        (points(validation), "#c0392b", "none", f"validation {validation[-1][1]:.2f}"),
    ]
    drawn = [
        f'<polyline points="{each}" fill="none" stroke="{color}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'
        f'<text x="{WIDTH - MARGIN - 190}" y="{MARGIN + 18 * row}" fill="{color}">{label}</text>'
        for row, (each, color, dashes, label) in enumerate(lines)
    ]
    for value in range(int(highest) + 1):
        (point,) = points([(0, value)]).split()
        drawn.append(f'<text x="{MARGIN - 20}" y="{float(point.split(",")[1]) + 4:.1f}" fill="#555">{value}</text>')
    drawn.append(
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - MARGIN + 20}" fill="#555" text-anchor="end">{last} steps</text>'
    )
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {font}>'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    picture.write_text("\n".join([head, background, *drawn, "</svg>"]) + "\n", encoding="utf-8")
