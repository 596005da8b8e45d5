"""Draws docs/layers.svg, the rows of tokens in a mixture of experts:  python docs/draw_layers.py"""

from __future__ import annotations

from pathlib import Path

import torch

import deep_gemm

PICTURE = Path(__file__).with_name("layers.svg")
TOPK_IDS = [[2, 0], [0, 3], [2, -1], [3, 2]]
NUM_EXPERTS = 4
TOKENS = ("#7aa6c2", "#c2a77a", "#8fbf8f", "#b58fbf")
HEIGHT, GAP, TOP, BOX = 26, 10, 96, 56
COLUMNS = (
    ("x", "tokens x hidden", "BF16"),
    ("a", "rows x hidden", "FP8, scales 1x128"),
    ("h", "rows x 2 intermediate", "BF16"),
    ("a", "rows x intermediate", "FP8, scales 1x128"),
    ("y", "rows x hidden", "BF16"),
    ("out", "tokens x hidden", "BF16"),
)
STEPS = (
    ("gather_cast_to_fp8", "by rows.token_of"),
    ("grouped product", "with w1, by rows.ids"),
    ("silu_mul_cast_to_fp8", "silu(gate) * up"),
    ("grouped product", "with w2, by rows.ids"),
    ("gather_weighted", "by rows.row_of"),
)
PITCH, LEFT = 176, 70


def svg() -> str:
    """Return the picture. `expert_rows` computes the row of each route."""
    rows = deep_gemm.expert_rows(torch.tensor(TOPK_IDS, dtype=torch.int64), NUM_EXPERTS)
    ids, token_of, row_of = rows.ids.tolist(), rows.token_of.tolist(), rows.row_of.tolist()
    # The rows of an expert are contiguous; a row without a token is the last.
    groups = [*range(NUM_EXPERTS), -1]
    at = {}
    y = TOP
    for expert in groups:
        for row in (row for row, of in enumerate(ids) if of == expert):
            at[row] = y
            y += HEIGHT
        y += GAP if expert in ids else 0
    bottom = y
    token_at = [TOP + 22 + token * (HEIGHT + 18) for token in range(len(TOPK_IDS))]
    width = LEFT + PITCH * (len(COLUMNS) - 1) + BOX + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 44}" font-family="sans-serif">',
        f'<rect width="{width}" height="{bottom + 44}" fill="#ffffff"/>',
    ]
    left = [LEFT + PITCH * place for place in range(len(COLUMNS))]
    for token, routes in enumerate(row_of):
        for row in (row for row in routes if row >= 0):
            middle = token_at[token] + HEIGHT / 2, at[row] + HEIGHT / 2
            lines.append(_line(left[0] + BOX, middle[0], left[1], middle[1], TOKENS[token]))
            lines.append(_line(left[4] + BOX, middle[1], left[5], middle[0], TOKENS[token]))
    for row, token in enumerate(token_of):
        for place in range(1, 5):
            lines.append(_box(left[place], at[row], "none" if token < 0 else TOKENS[token], f"row {row}"))
            if place < 4 and token >= 0:
                middle_y = at[row] + HEIGHT / 2
                lines.append(_line(left[place] + BOX, middle_y, left[place + 1], middle_y, "#999999"))
    for token, token_y in enumerate(token_at):
        lines += [_box(x, token_y, TOKENS[token], f"token {token}") for x in (left[0], left[5])]
        routes = ", ".join(map(str, TOPK_IDS[token]))
        lines.append(_text(left[0] - 4, token_y + HEIGHT / 2 + 4, routes, 11, "end"))
    lines.append(_text(left[0] - 4, TOP + 8, "topk_ids", 11, "end"))
    for expert in range(NUM_EXPERTS):
        mine = [at[row] for row, of in enumerate(ids) if of == expert]
        if mine:
            middle_y = (min(mine) + max(mine) + HEIGHT) / 2 - 3
            lines += [
                _text((left[place] + BOX + left[place + 1]) / 2, middle_y, f"expert {expert}", 11) for place in (1, 3)
            ]
    for x, (name, shape, kind) in zip(left, COLUMNS, strict=True):
        lines.append(_text(x + BOX / 2, TOP - 12, name, 15, weight="bold"))
        lines += [_text(x + BOX / 2, bottom + 14 + 16 * i, text, 11) for i, text in enumerate((shape, kind))]
    for x, (name, how) in zip(left, STEPS, strict=False):
        middle_x = x + BOX / 2 + PITCH / 2
        lines += [_text(middle_x, 26, name, 13, weight="bold"), _text(middle_x, 44, how, 11)]
    return "\n".join([*lines, "</svg>", ""])


def _box(x: float, y: float, colour: str, text: str) -> str:
    dashes = ' stroke-dasharray="3 3"' if colour == "none" else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" fill="{colour}" stroke="#444444"{dashes}/>'
        + _text(x + BOX / 2, y + HEIGHT / 2 + 4, text, 11)
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())
